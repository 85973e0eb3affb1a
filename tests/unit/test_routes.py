"""Routes: what the engine or an earlier pass chose is what a later pass takes, token by token and layer by layer."""

from __future__ import annotations

import copy
import itertools
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PhimoeConfig, PreTrainedModel

from spmdrl.algo.metrics import Balance
from spmdrl.config import CorrectionConfig
from spmdrl.config.model import ModelConfig
from spmdrl.engine.torch.engine import TorchEngine
from spmdrl.learn.correction import depths_of
from spmdrl.learn.objective import PolicyObjective
from spmdrl.model.layers import replace_layers
from spmdrl.model.load import model_without_memory
from spmdrl.model.operators import operators_of
from spmdrl.model.policy import Policy, TokenLogprobs
from spmdrl.model.routes import FREE, Routers, balance_refusal, routes_refusal
from spmdrl.model.sharding import checkpoint_layers, decoder_layers
from spmdrl.refit.refit import load_whole
from spmdrl.rollout.codec import Codec
from spmdrl.step.batch import lay_end_to_end, to_sequences
from spmdrl.types import (
    MicroBatch,
    Prompt,
    Request,
    Response,
    RewardedRollout,
    RewardOutcome,
    Routes,
    Sequence,
    Span,
    Trajectory,
    Turn,
    UserError,
)
from tests.helpers.configs import loss_config
from tests.helpers.conversations import conversations
from tests.helpers.models import config_of, save_gpt_oss, save_other, save_qwen3_moe
from tests.helpers.rollouts import one_turn
from tests.helpers.sequences import random_requests, random_sequences, sequences_of

ALONE: Any = SimpleNamespace(size=lambda: 1)  # the mesh of one rank
# As many experts as make near ties likely, and of which a wrong one is felt.
MANY: dict[str, Any] = {"num_experts": 64, "num_experts_per_tok": 2, "norm_topk_prob": True, "num_hidden_layers": 2}
MANY |= {"hidden_size": 64, "moe_intermediate_size": 96}
FAMILIES = ("mixtral", "deepseek_v3", "glm4_moe", "ernie4_5_moe", "lfm2_moe", "minimax_m2", "granitemoe", "qwen2_moe")


def policy_from(path: str, dtype: torch.dtype = torch.float32, checkpointing: Any = "none") -> Policy:
    """The policy of a saved model, whose routers are watched."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="spmdrl").eval()
    replace_layers(model, operators_of("sdpa"))
    if checkpointing != "none":
        checkpoint_layers(model, decoder_layers(model), recomputed=checkpointing, every_layers=1)
    policy = Policy(model, kernel="sdpa", temperature=1.0, logits_chunk_tokens=64)
    policy.routers = Routers(model)
    return policy


def engine_of(model: PreTrainedModel, dtype: torch.dtype = torch.float32) -> TorchEngine:
    settings: dict[str, Any] = {"device": torch.device("cpu"), "dtype": dtype, "kernel": "sdpa", "max_running": 8}
    engine = TorchEngine(model.config, **settings, records_routes=True)
    load_whole(engine, {name: weight.to(dtype) for name, weight in model.named_parameters()}, version=0)
    return engine


def asked(count: int) -> list[Request]:
    requests = random_requests(count, max_response_tokens=24, temperature=1.0, stop_token_ids=frozenset())
    return [replace(request, routes_from=0) for request in requests]


def answers(engine: TorchEngine, requests: list[Request]) -> list[Response]:
    responses = dict(engine.generate(requests))
    return [responses[place] for place in range(len(requests))]


def routed(requests: list[Request], responses: list[Response]) -> list[Sequence]:
    """Sequences of an engine's answers, with the routes that it has reported."""
    turns = [
        Turn(context_ids=request.prompt_ids, response=response)
        for request, response in zip(requests, responses, strict=True)
    ]
    routes = [Trajectory(turns=(turn,)).routes for turn in turns]
    return [
        replace(sequence, routes=of_sequence)
        for sequence, of_sequence in zip(sequences_of(requests, responses), routes, strict=True)
    ]


def with_gradients(policy: Policy, micro_batch: MicroBatch) -> tuple[TokenLogprobs, dict[str, Tensor]]:
    policy.zero_grad()
    outputs = policy(micro_batch)
    outputs.logprobs.sum().backward()
    found = {name: p.grad.clone() for name, p in policy.model.named_parameters() if p.grad is not None}
    return outputs, found


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "gemma4_text with experts", *FAMILIES])
def test_a_models_own_routes_change_no_bit_and_others_are_taken(tmp_path: Path, family: str) -> None:
    save = {"qwen3_moe": save_qwen3_moe, "gpt_oss": save_gpt_oss}
    path = save[family](tmp_path) if family in save else save_other(family, tmp_path)
    policy, plain = policy_from(path), policy_from(path)
    plain.routers = None
    micro_batch = lay_end_to_end(random_sequences(4), {})
    outputs, gradients = with_gradients(policy, micro_batch)
    own = policy.own_routes(micro_batch)
    assert policy.routers is not None and own.shape[:2] == (len(micro_batch.token_ids), policy.routers.num_layers)
    again, same = with_gradients(policy, replace(micro_batch, routes=own))
    free, free_gradients = with_gradients(policy, replace(micro_batch, routes=torch.full_like(own, FREE)))
    without, plain_gradients = with_gradients(plain, micro_batch)
    for one, slopes in ((again, same), (free, free_gradients), (without, plain_gradients)):
        assert torch.equal(one.logprobs, outputs.logprobs)
        assert slopes.keys() == gradients.keys()
        assert all(torch.equal(slopes[name], gradients[name]) for name in gradients)
    assert again.router_disagreement is not None and not again.router_disagreement.any()
    assert free.router_disagreement is not None and (free.router_disagreement[micro_batch.loss_mask][1:] < 0).any()
    others = (own + 1) % policy.routers.num_experts
    moved, slopes = with_gradients(policy, replace(micro_batch, routes=others))
    assert not torch.equal(moved.logprobs, outputs.logprobs)
    assert torch.equal(policy.own_routes(micro_batch), others)
    routers = [name for name in slopes if ("gate." in name or "router." in name) and name.endswith("weight")]
    assert routers and all(slopes[name].any() for name in routers), "gradients reach the routers"


@pytest.mark.parametrize("level", ["full", "selective"])
def test_layers_that_are_computed_again_go_the_same_way(tmp_path: Path, level: str) -> None:
    path = save_qwen3_moe(tmp_path)
    micro_batch = lay_end_to_end(random_sequences(4), {})
    num_layers, num_experts = 2, 5
    draw = torch.Generator().manual_seed(1)
    scores = torch.rand(len(micro_batch.token_ids), num_layers, num_experts, generator=draw)
    micro_batch = replace(micro_batch, routes=scores.topk(2).indices.short())
    whole, expected = with_gradients(policy_from(path), micro_batch)
    outputs, gradients = with_gradients(policy_from(path, checkpointing=level), micro_batch)
    assert torch.equal(outputs.logprobs, whole.logprobs)
    assert all(torch.equal(gradients[name], expected[name]) for name in expected)


def test_the_engine_reports_the_routes_that_the_trainer_would_choose(tmp_path: Path) -> None:
    path = save_qwen3_moe(tmp_path)
    policy, requests = policy_from(path), asked(12)
    responses = answers(engine_of(policy.model), requests)
    sequences = routed(requests, responses)
    micro_batch = lay_end_to_end(sequences, {}, multiple=7)
    assert micro_batch.routes is not None
    policy(replace(micro_batch, routes=None))
    own, has_route = policy.own_routes(micro_batch), (micro_batch.routes >= 0).all(-1).all(-1)
    assert int(has_route.sum()) == sum(len(s.token_ids) - 1 for s in sequences), "all but the last tokens"
    assert torch.equal(own[has_route].sort(-1).values, micro_batch.routes[has_route].sort(-1).values)
    outputs = policy(micro_batch)
    assert outputs.router_disagreement is not None and not outputs.router_disagreement[micro_batch.loss_mask].any()


def test_later_turns_report_only_what_is_new_and_the_trajectory_has_all(tmp_path: Path) -> None:
    model = policy_from(save_qwen3_moe(tmp_path)).model
    cached = [replace(request, cache_on_finish=frozenset({"length"})) for request in asked(3)]
    said = [(9, 8, 7), (5,), (11, 12)]
    for begins in (cached, asked(3)):  # the prefix cache has the beginning of a conversation, or nothing has
        turns = conversations(engine_of(model), begins, said, num_turns=3)
        for number in range(3):
            mine = turns[3 * number : 3 * number + 3]
            first = mine[0][1].routes
            assert first is not None and first.start == 0
            *_, (request, last) = mine
            whole = answers(engine_of(model), [replace(request, cache_on_finish=frozenset())])[0]
            assert whole.routes is not None and last.routes == whole.routes
            rest = replace(request, routes_from=first.end, cache_on_finish=frozenset())
            (partial,) = answers(engine_of(model), [rest])
            assert partial.routes is not None and first.continued(partial.routes) == whole.routes


def test_a_resumed_response_goes_on_with_its_routes(tmp_path: Path) -> None:
    model = policy_from(save_qwen3_moe(tmp_path)).model
    (request,) = asked(1)
    request = replace(request, max_response_tokens=20)
    (whole,) = answers(engine_of(model), [request])
    (begun,) = answers(engine_of(model), [replace(request, max_response_tokens=8)])
    assert begun.routes is not None
    rest = replace(request, response_ids=begun.token_ids, routes_from=begun.routes.end)
    continued = begun.continued(*answers(engine_of(model), [rest]))
    assert continued.token_ids == whole.token_ids and continued.routes == whole.routes
    codec = Codec[Response](Response)
    assert codec.load(codec.dump(continued)) == continued


def worst(policy: Policy, micro_batch: MicroBatch) -> float:
    with torch.no_grad():
        apart = policy(micro_batch).logprobs.float() - micro_batch.rollout_logprobs
    return float(apart[micro_batch.loss_mask].abs().max())


@pytest.mark.parametrize("planted", ["routers", "bfloat16"])
def test_the_worst_mismatch_falls_tenfold(tmp_path: Path, planted: str) -> None:
    """An engine whose routers are off by a thousandth, or one in bfloat16: near ties between experts fall otherwise."""
    policy = policy_from(save_qwen3_moe(tmp_path, **MANY))
    sampler, dtype = copy.deepcopy(policy.model), torch.float32
    if planted == "routers":
        draw = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, weight in sampler.named_parameters():
                if "gate." in name:
                    weight += 1e-3 * weight.std() * torch.randn(weight.shape, generator=draw)
    else:
        dtype = torch.bfloat16
    requests = asked(64)
    sequences = routed(requests, answers(engine_of(sampler, dtype), requests))
    micro_batch = lay_end_to_end(sequences, {})
    free, replayed = (worst(policy, m) for m in (replace(micro_batch, routes=None), micro_batch))
    assert replayed < free / 10


def test_a_trajectory_has_the_routes_with_which_its_tokens_were_first_followed() -> None:
    def turn(context: int, sampled: int, start: int, expert: int, num_tokens: int) -> Turn:
        routes = Routes.of(start, torch.full((num_tokens, 1, 2), expert))
        response = Response(
            token_ids=(3,) * sampled,
            logprobs=(-1.0,) * sampled,
            finish_reason="stop",
            spans=(Span(0, sampled),),
            routes=routes,
        )
        return Turn(context_ids=(2,) * context, response=response)

    turns = (turn(2, 3, 0, 1, 4), turn(1, 2, 0, 2, 7))  # the second has read everything again
    routes = Trajectory(turns=turns).routes
    assert routes is not None and routes[:, 0, 0].tolist() == [1, 1, 1, 1, 2, 2, 2, FREE]
    assert Trajectory(turns=(replace(turns[0], response=replace(turns[0].response, routes=None)),)).routes is None


def test_a_missing_record_is_never_silent() -> None:
    prompt = Prompt(prompt_id=7, token_ids=(2, 3), text="", answer=None, task="", metadata={})
    response = Response(token_ids=(4, 5, 6), logprobs=(-1.0,) * 3, finish_reason="stop", spans=(Span(0, 3),))
    known = replace(response, routes=Routes.of(0, torch.zeros(4, 1, 2)))

    def sequences(response: Response, **changes: Any) -> list[Sequence]:
        rollout = one_turn(prompt, response, **changes)
        rewarded = RewardedRollout(index=0, rollout=rollout, outcome=RewardOutcome(reward=1.0, parts={}))
        return to_sequences([rewarded], ALONE, needs_routes=True)

    (sequence,) = sequences(known)
    assert sequence.routes is not None and sequence.routes[:, 0, 0].tolist() == [0, 0, 0, 0, FREE]
    for missing, num_known in ((response, 0), (replace(response, routes=Routes.of(0, torch.zeros(3, 1, 2))), 3)):
        with pytest.raises(UserError, match=f"the routes of {num_known} of the 4 tokens before the last of sample 0"):
            sequences(missing)
        assert sequences(missing, is_masked=True), "nothing of it is trained"


def test_disagreement_and_coverage_are_reported() -> None:
    (micro_batch,) = [lay_end_to_end(random_sequences(2), {})]
    micro_batch = replace(micro_batch, advantages=micro_batch.rewards.float())
    logprobs = micro_batch.rollout_logprobs.clone().requires_grad_()
    places = micro_batch.loss_mask.nonzero().flatten()
    disagreement = torch.zeros(len(logprobs))
    disagreement[places[:3]] = torch.tensor([0.5, 1.0, -torch.inf])
    outputs = TokenLogprobs(logprobs, -logprobs.detach(), router_disagreement=disagreement)
    for kind, area in (("R2", "update"), ("R3", "mismatch")):
        objective = PolicyObjective(loss_config(), correction=CorrectionConfig(router_replay=kind))
        result = objective(outputs, micro_batch)
        values, where = result.elsewhere[f"{area}/router_disagree_fraction"]
        assert values[where].sum() == 1.5 and int(where.sum()) == len(places) - 1
        replayed = result.means[f"{area}/router_replayed_fraction"]
        assert float(replayed[micro_batch.loss_mask].mean()) == pytest.approx(1 - 1 / len(places))


def test_models_without_routes_are_refused_by_the_reason(tmp_path: Path) -> None:
    def refusal(config: Any) -> str | None:
        return routes_refusal(model_without_memory(config, ModelConfig(path="m")))

    for family in FAMILIES:
        assert refusal(config_of(family)) is None
    assert refusal(config_of("olmo2")) == "has no experts"
    reasons = {one: balance_refusal(model_without_memory(config_of(one), ModelConfig(path="m"))) for one in FAMILIES}
    with_biases = {one for one, reason in reasons.items() if reason is None}
    assert {"deepseek_v3", "glm4_moe"} <= with_biases and not {"mixtral", "ernie4_5_moe", "qwen2_moe"} & with_biases
    sparse_mixer = PhimoeConfig(hidden_size=32, intermediate_size=24, num_hidden_layers=1, num_local_experts=4)
    assert refusal(sparse_mixer) == "has a router that does not take the experts of the highest scores"


def test_loads_of_experts_add_up_over_micro_batches(tmp_path: Path) -> None:
    policy, sequences = policy_from(save_qwen3_moe(tmp_path)), random_sequences(6)
    whole = lay_end_to_end(sequences, {})
    loads = policy(whole).expert_loads
    assert loads is not None and loads.shape == (2, 5)
    own = policy.own_routes(whole)[:-1][whole.loss_mask[1:]]  # of the rows that predict loss tokens
    assert all(torch.equal(loads[layer], own[:, layer].flatten().bincount(minlength=5)) for layer in range(2))
    parts = [policy(lay_end_to_end(part, {})).expert_loads for part in (sequences[:2], sequences[2:])]
    assert torch.equal(parts[0] + parts[1], loads)
    for is_peak, expected in ((True, loads.amax(1) * 5 / loads.sum(1)), (False, entropies(loads))):
        metrics = [Balance(is_peak, 5, tuple(part.flatten().tolist())) for part in parts]
        assert metrics[0].merge(metrics[1]).value() == pytest.approx(float(expected.mean()), rel=1e-5)
    assert math.isnan(Balance(True, 5, (0.0,) * 10).value())
    assert Balance(False, 2, (3.0, 3.0)).value() == 1.0 and Balance(False, 2, (6.0, 0.0)).value() == 0.0


def slow_imbalance(policy: Policy, micro_batch: MicroBatch) -> Tensor:
    """Sequence by sequence, token by token and layer by layer, from what reaches the routers and their weights."""
    seen: list[tuple[torch.nn.Module, Tensor]] = []
    gates = [module for name, module in policy.model.named_modules() if name.endswith((".gate", ".router"))]
    hooks = [gate.register_forward_pre_hook(lambda gate, args: seen.append((gate, args[0]))) for gate in gates]
    policy(micro_batch)
    for hook in hooks:
        hook.remove()
    assert policy.routers is not None
    taken, num_experts = policy.routers.taken, policy.routers.num_experts
    found = torch.zeros(len(micro_batch.token_ids))
    for start, end in itertools.pairwise(micro_batch.cu_seqlens.tolist()):
        rows = [t - 1 for t in range(start + 1, end) if micro_batch.loss_mask[t]]
        for layer, (gate, hidden) in enumerate(seen):
            weight = gate.get_parameter("layer.weight" if hasattr(gate, "layer") else "weight")
            bias = gate._parameters.get("bias")
            logits = torch.nn.functional.linear(hidden.flatten(0, -2), weight, bias)
            sigmoid = logits.sigmoid()
            by_sigmoid = policy.model.config.model_type in ("deepseek_v3", "glm4_moe", "lfm2_moe", "minimax_m2")
            shares = sigmoid / sigmoid.sum(-1, keepdim=True) if by_sigmoid else logits.softmax(-1)
            loads = taken[rows, layer].flatten().long().bincount(minlength=num_experts)
            for row in rows:
                of_token = (num_experts * loads / loads.sum() * shares[row]).sum()
                found[row + 1] += of_token.detach() / len(seen)
    return found


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", *FAMILIES])
def test_the_imbalance_of_experts_is_the_slow_twins(tmp_path: Path, family: str) -> None:
    """Sequences beside each other have what they have alone."""
    others = {"qwen3_moe": save_qwen3_moe, "gpt_oss": save_gpt_oss}
    path = others[family](tmp_path) if family in others else save_other(family, tmp_path)
    policy, sequences = policy_from(path), random_sequences(4)
    assert policy.routers is not None
    policy.routers.watch_scores()
    whole = lay_end_to_end(sequences, {}, multiple=7)
    found = policy(whole).expert_imbalance
    assert found is not None and found.max() > 1.0
    torch.testing.assert_close(found, slow_imbalance(policy, whole), rtol=1e-4, atol=1e-5)
    alone = [policy(lay_end_to_end([one], {})).expert_imbalance for one in sequences]
    torch.testing.assert_close(found[: -whole.seqlens[-1]], torch.cat(alone), rtol=1e-4, atol=1e-5)


def test_a_loss_evens_the_loads_of_experts(tmp_path: Path) -> None:
    """Its gradient reaches the routers, through layers that are computed again too."""
    path, sequences = save_qwen3_moe(tmp_path), random_sequences(6)
    micro_batch = lay_end_to_end(sequences, {sequence.index: 1.0 for sequence in sequences})
    micro_batch = replace(micro_batch, advantages=torch.zeros(len(micro_batch.token_ids)))
    loss = PolicyObjective(loss_config(expert_balance_coef=0.5))
    ends: list[list[Tensor]] = []
    for level in ("none", "full"):
        policy = policy_from(path, checkpointing=level)
        assert policy.routers is not None
        policy.routers.watch_scores()
        gates = [weight for name, weight in policy.model.named_parameters() if "gate.weight" in name]
        with torch.no_grad():
            gates[0][0] *= 4.0
        evenness = []
        for _ in range(30):
            outputs = policy(micro_batch)
            objective = loss(outputs, micro_batch)
            torch.testing.assert_close(objective.loss_sum, 0.5 * outputs.expert_imbalance[micro_batch.loss_mask].sum())
            evenness.append(float(entropies(outputs.expert_loads).mean()))
            gradients = torch.autograd.grad(objective.loss_sum, gates)
            assert all(one.logits is None for one in policy.routers._choices), "nothing stays where an engine samples"
            with torch.no_grad():
                for gate, gradient in zip(gates, gradients, strict=True):
                    gate -= 0.02 * gradient / gradient.norm()
        assert evenness[-1] > evenness[0] + 0.005
        ends.append(gates)
    assert all(torch.equal(plain, again) for plain, again in zip(*ends, strict=True))


def entropies(loads: Tensor) -> Tensor:
    return torch.distributions.Categorical(loads).entropy() / math.log(loads.shape[1])


def test_the_mismatch_is_reported_by_depth_of_context() -> None:
    assert depths_of(1000) == depths_of(1024) == [] and depths_of(9000) == [0, 1024, 8192]
    (micro_batch,) = [lay_end_to_end(random_sequences(2), {})]
    places = torch.arange(len(micro_batch.token_ids)) * 300
    micro_batch = replace(micro_batch, positions=places, old_logprobs=micro_batch.rollout_logprobs + places / 300)
    micro_batch = replace(micro_batch, advantages=micro_batch.rewards.float())
    objective = PolicyObjective(loss_config(), longest_tokens=9000)
    logprobs = micro_batch.rollout_logprobs
    elsewhere = objective(TokenLogprobs(logprobs, -logprobs), micro_batch).elsewhere
    assert list(elsewhere) == [f"mismatch/mean_abs_nats_from_{start}" for start in (0, 1024, 8192)]
    apart, trained = (micro_batch.old_logprobs - logprobs).abs(), micro_batch.loss_mask
    for (values, where), start, end in zip(elsewhere.values(), (0, 1024, 8192), (1024, 8192, 2**40), strict=True):
        inside = trained & (places >= start) & (places < end)
        assert torch.equal(where, inside) and torch.equal(values[where], apart[inside])


def test_the_mismatch_of_what_newer_weights_sampled_is_reported() -> None:
    """The tokens of the newest weights, in a response that went on over two refits."""
    prompt = Prompt(prompt_id=7, token_ids=(2, 3), text="", answer=None, task="", metadata={})
    spans = (Span(0, 2), Span(1, 1), Span(2, 3))
    begun = Response(token_ids=(4, 5, 6, 7, 8, 9), logprobs=(-1.0,) * 6, finish_reason="stop", spans=spans)
    whole = replace(begun, spans=(Span(1, 6),))
    rewarded = [
        RewardedRollout(index=index, rollout=one_turn(prompt, response), outcome=RewardOutcome(reward=1.0, parts={}))
        for index, response in enumerate((whole, begun))
    ]
    sequences = to_sequences(rewarded, ALONE)
    assert lay_end_to_end(sequences[:1], {}).after_refit is None
    micro_batch = lay_end_to_end(sequences, {})
    apart = torch.arange(16.0) / 8
    micro_batch = replace(
        micro_batch,
        old_logprobs=micro_batch.rollout_logprobs - apart,
        advantages=micro_batch.rewards.float(),
    )
    logprobs = micro_batch.rollout_logprobs
    objective = PolicyObjective(loss_config())(TokenLogprobs(logprobs, -logprobs), micro_batch)
    values, where = objective.elsewhere["mismatch/mean_abs_nats_after_refit"]
    assert torch.nonzero(where).flatten().tolist() == [13, 14, 15]
    torch.testing.assert_close(values[where], apart[where])
