"""Distillation: the gradient is that of the whole vocabulary's divergence, on any layout, packed or alone."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from spmdrl.config import (
    AdvantageConfig,
    Algorithm,
    CorrectionConfig,
    DistillConfig,
    LoraConfig,
    OptimConfig,
    OtherModelConfig,
    ParallelConfig,
)
from spmdrl.config.plan import Plan
from spmdrl.data.image_store import ImageStore
from spmdrl.dist.mesh import build_meshes
from spmdrl.dist.session import World, spmd_session
from spmdrl.learn.learner import Learner
from spmdrl.learn.objective import PolicyObjective
from spmdrl.learn.update import update
from spmdrl.model.frozen import Follower, FrozenModel, load_frozen
from spmdrl.model.lora.policy import load_trained, random_values
from spmdrl.model.sharding import decoder_layers
from spmdrl.step.batch import build_batch
from spmdrl.step.images import Images
from spmdrl.step.logprobs import add_columns
from spmdrl.step.teachers import FrozenModels
from spmdrl.types import NO_TEACHER, Hint, MicroBatch, Sequence, TurnSpan
from tests.helpers.configs import loss_config, model_config, plan_for
from tests.helpers.learners import full_weights
from tests.helpers.models import HAS_EXPERT_PLANS, save_qwen3, save_qwen3_moe
from tests.helpers.parity import assert_same_change, dealt, initial
from tests.helpers.ranks import run_ranks
from tests.helpers.sequences import random_sequences
from tests.helpers.vision_models import inputs_of, mixed_sequences, save_qwen3_vl, save_qwen3_vl_moe, stored

VOCABULARY, SEQUENCES, TEMPERATURE = 96, 12, 0.8
ONE = {"teacher": "big"}
BOTH = {"teachers": [{"model": "big", "tasks": ["a"], "weight": 0.5}, {"model": "wide", "tasks": ["b"], "weight": 2.0}]}
OWN: dict[str, dict[str, Any]] = {
    "base": {"adapters": "off"},
    "policy": {"weights": "policy"},
    "average": {"weights": "average", "decay": 0.75},
}
Case = tuple[dict[str, Any], dict[str, int], dict[str, Any]]  # [distill], [parallel], changes to the plan
Outcome = tuple[dict[str, Tensor], dict[str, float]]  # every weight after one update, and the update's metrics


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directories of a student and of teachers, one of which has more rows of its head."""
    folder = tmp_path_factory.mktemp("models")
    save_qwen3(folder / "student", vocab_size=VOCABULARY)
    save_qwen3(folder / "big", vocab_size=VOCABULARY, seed=1, hidden_size=96, num_hidden_layers=3)
    save_qwen3(folder / "wide", vocab_size=VOCABULARY, seed=2, tie_word_embeddings=False)
    save_qwen3(folder / "padded", vocab_size=VOCABULARY + 16, seed=3)
    save_qwen3_moe(folder / "experts", vocab_size=VOCABULARY, num_experts=4)
    return folder


def _sequences() -> list[Sequence]:
    """Sequences of two data sources in turn."""
    both = random_sequences(SEQUENCES, vocabulary=VOCABULARY)
    return [dataclasses.replace(sequence, teacher=number % 2) for number, sequence in enumerate(both)]


def _distil_each(folder: Path, cases: list[Case]) -> list[Outcome]:
    """One update of the student by each case; run on each rank."""
    with spmd_session(threads_per_rank=1, deterministic=True) as world:
        return [_distilled(world, folder, *case) for case in cases]


def _distilled(
    world: World, folder: Path, table: dict[str, Any], parallel: dict[str, int], changes: dict[str, Any]
) -> Outcome:
    student = str(folder / changes.get("student", "student"))
    distill, lora = DistillConfig(**table), LoraConfig(rank=4) if "lora" in changes else None
    names = [one.model for one in distill.by_place]
    own = changes.get("models", {})
    models = {name: OtherModelConfig(**OWN.get(name) or {"path": str(folder / name)}, **own) for name in names}
    layouts = {f"models.{name}": one.layout(ParallelConfig(**parallel)) for name, one in models.items()}
    meshes = build_meshes(world, ParallelConfig(**parallel), layouts=layouts if own else {})
    settings = model_config(student)
    policy = load_trained(settings, lora, meshes, temperature=TEMPERATURE, seed=0)
    temperatures = dict.fromkeys(names, distill.teacher_temperature or TEMPERATURE)
    frozen = load_frozen(policy, settings, models, meshes, temperatures=temperatures)
    if changes.get("lora") == "moved" and policy.adapters is not None:
        policy.adapters.load(random_values(policy.adapters.trained, seed=1))
    store, limits = changes.get("store") and ImageStore(changes["store"], max_bytes=2**24), {"max_patches": 40}
    images = {
        name: Images(one, store, meshes, dtype=torch.float32, **limits)
        for name, one in {"": policy, **{name: one.model for name, one in frozen.items()}}.items()
    }
    look = {name: images[name].encode for name in frozen} if store else {}
    taught = FrozenModels(policy, frozen, distill, look=look)
    sequences = changes.get("sequences") or _sequences()
    sequences = sequences if distill.teachers else [dataclasses.replace(one, teacher=0) for one in sequences]
    only = changes.get("only", range(len(names)))
    sequences = [one if one.teacher in only else dataclasses.replace(one, teacher=NO_TEACHER) for one in sequences]
    plan: Plan = plan_for(SEQUENCES, world.num_ranks, **changes.get("plan", {}))
    mine = dealt(sequences, world.rank, world.num_ranks, "like cards")
    coef = changes.get("environment_coef", 0.0)
    weighting = {"aggregation": changes.get("aggregation", "token_mean"), "others": changes.get("others", ())}
    batch = build_batch(mine, plan, meshes, environment_coef=coef, distill=distill, **weighting)
    batch, _, _ = images[""].encode_batch(batch)
    advantages = (
        (lambda one: one.rewards.float()) if changes.get("rewarded") else lambda one: torch.zeros(len(one.rewards))
    )
    batch = add_columns(batch, {"advantages": advantages}, meshes.training)
    objective = PolicyObjective(loss_config(), distill=distill)
    optim = OptimConfig(name="sgd", lr=1.0, max_grad_norm=1e6)
    followers = {name: Follower.of(one, frozen[name].model) for name, one in models.items() if one.follows}
    learner = Learner(policy, optim, objective, num_updates=1, dtype=torch.float32, followers=followers)
    with patch.object(_fsdp_param_group, "foreach_all_gather", wraps=_fsdp_param_group.foreach_all_gather) as gather:
        mini_batches = taught.teach(batch, meshes).mini_batches
    whole = [p for one in frozen.values() if one.has_own_weights for p in one.model.parameters()]
    assert all(isinstance(p, DTensor) for p in whole), "a frozen model stays gathered after its turn"
    with taught.teaching():
        metrics = update(learner, mini_batches, meshes, step=1)
    counts = {"gathers": float(gather.call_count), "passes": float(sum(map(len, mini_batches)))} if own else {}
    moved = full_weights(policy, meshes) if policy.adapters is None else policy.adapters.trained
    for follower in followers.values():
        moved = full_weights(follower.model, meshes)
    if changes.get("interrupted"):
        _interrupt(frozen[names[0]], batch.micro_batches[0])
    return moved, counts | {name: metric.value() for name, metric in metrics.items()}


def _interrupt(model: FrozenModel, micro_batch: MicroBatch) -> None:
    """Let a pass fail in the second layer; nothing stays gathered."""

    def fail(*_: Any) -> None:
        raise RuntimeError("interrupted")

    decoder_layers(model.model.model)[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="interrupted"), torch.no_grad(), model.turn():
        model(micro_batch)
    assert all(isinstance(p, DTensor) for p in model.model.parameters())


def _whole_vocabulary(
    folder: Path,
    kind: str,
    beta: float,
    teachers: list[tuple[str, float]],
    sequences: list[Sequence] | None = None,
    k: int | None = None,
    last_kind: str | None = None,
) -> Outcome:
    """Make that update from all logits at once; with `k`, all but the teacher's k most probable tokens are one.

    `last_kind` is the last teacher's divergence, where it has another."""
    student = AutoModelForCausalLM.from_pretrained(folder / "student", dtype=torch.float64)
    losses, weights_of = [], []
    for place, (name, weight) in enumerate(teachers):
        teacher = AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float64)
        found: list[Tensor] = []
        for number, sequence in enumerate(sequences or _sequences()):
            if number % len(teachers) == place:
                ids = torch.tensor([sequence.token_ids])
                wanted = torch.tensor(sequence.loss_mask)[1:]
                seen = torch.tensor([sequence.hint.token_ids + sequence.token_ids[sequence.hint.num_replaced :]])
                with torch.no_grad():
                    t = (teacher(seen).logits[0, :-1, :VOCABULARY] / TEMPERATURE).log_softmax(-1)
                    longer = t.new_zeros(max(0, ids.shape[1] - seen.shape[1]), VOCABULARY)
                    t = torch.cat([longer, t])[1 - ids.shape[1] :]
                s = (student(ids).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
                if k is not None:
                    best, rest = t.sort(descending=True).indices.split([k, VOCABULARY - k], -1)
                    s, t = (
                        torch.cat([x.gather(-1, best), x.gather(-1, rest).logsumexp(-1, keepdim=True)], -1)
                        for x in (s, t)
                    )
                its_kind = last_kind if last_kind and place == len(teachers) - 1 else kind
                found.append(_divergence(s, t, its_kind, beta)[wanted])
        losses.append(torch.cat(found).mean())
        weights_of.append(weight)
    loss = sum(weight * one for weight, one in zip(weights_of, losses, strict=True))
    assert isinstance(loss, Tensor)
    loss.backward()
    moved = {name: (p - p.grad).detach().float() for name, p in student.named_parameters() if p.grad is not None}
    return moved, {
        "update/loss": float(loss.detach()),
        f"distill/{kind}_nats_{teachers[0][0]}": float(losses[0].detach()),
        f"distill/{last_kind or kind}_nats_{teachers[-1][0]}": float(losses[-1].detach()),
    }


def _divergence(s: Tensor, t: Tensor, kind: str, beta: float) -> Tensor:
    def kl(one: Tensor, other: Tensor) -> Tensor:
        return (one.exp() * (one - other)).sum(-1)

    if kind == "jsd":
        m = torch.logaddexp(t + torch.tensor(beta).log(), s + torch.tensor(1 - beta).log())
        return beta * kl(t, m) + (1 - beta) * kl(s, m)
    return kl(s, t) if kind == "reverse" else kl(t, s)


@pytest.mark.parametrize(
    "kind", [*(pytest.param(kind, marks=pytest.mark.slow) for kind in ("reverse", "forward")), "jsd"]
)
def test_the_gradient_is_that_of_all_logits(folder: Path, kind: str) -> None:
    beta = {"beta": 0.3} if kind == "jsd" else {}
    other = {"reverse": "forward", "forward": "jsd", "jsd": "reverse"}[kind]
    big, wide = BOTH["teachers"]
    mixed = {"beta": 0.3} if "jsd" in (kind, other) else {}
    cases: list[Case] = [
        ({**ONE, "divergence": kind, **beta}, {}, {}),
        ({**BOTH, "divergence": kind, **beta}, {}, {}),
        ({"teacher": "padded", "divergence": kind, **beta}, {}, {}),
        ({**BOTH, "divergence": kind, **beta}, {}, {"plan": {"max_tokens_per_micro_batch": 4096}}),
        ({**BOTH, "divergence": kind, **beta, "top_k": 12}, {}, {}),
        ({"teachers": [big, {**wide, "divergence": other}], "divergence": kind, **mixed}, {}, {}),
    ]
    (found,) = run_ranks(1, _distil_each, folder, cases)
    start = initial(str(folder / "student"))
    two = [("big", 0.5), ("wide", 2.0)]
    one, padded = [("big", 1.0)], [("padded", 1.0)]
    compared = (one, None, None), (two, None, None), (padded, None, None), (two, None, None), (two, 12, None)
    for (weights, metrics), (teachers, k, last_kind) in zip(found, (*compared, (two, None, other)), strict=True):
        expected, numbers = _whole_vocabulary(folder, kind, 0.3, teachers, k=k, last_kind=last_kind)
        assert_same_change(expected, weights, start, 2e-5)
        assert metrics["update/loss"] == pytest.approx(numbers["update/loss"], rel=1e-5)
        if len(teachers) == 2:
            assert {name: metrics[name] for name in numbers} == pytest.approx(numbers, rel=1e-5)
        if last_kind is not None:
            assert metrics[f"distill/{last_kind}_nats"] == metrics[f"distill/{last_kind}_nats_wide"]
            assert metrics[f"distill/{kind}_nats"] == metrics[f"distill/{kind}_nats_big"]


LAYOUTS: dict[int, list[dict[str, int]]] = {2: [{}, {"cp": 2}, {"tp": 2}], 4: [{"cp": 2}, {"tp": 2, "cp": 2}]}


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_gradient_is_that_of_one_rank(folder: Path, num_ranks: int) -> None:
    tables: list[dict[str, Any]] = [{**BOTH, "divergence": "jsd"}, {**BOTH, "divergence": "reverse", "top_k": 60}]
    wholes = run_ranks(1, _distil_each, folder, [(table, {}, {}) for table in tables])[0]
    start = initial(str(folder / "student"))
    cases = [(table, layout, {}) for table in tables for layout in LAYOUTS[num_ranks]]
    found = run_ranks(num_ranks, _distil_each, folder, cases)[0]
    expected = [whole for whole in wholes for _ in LAYOUTS[num_ranks]]
    for (_, layout, _), (weights, metrics), (moved, numbers) in zip(cases, expected, found, strict=True):
        assert_same_change(weights, moved, start, 2e-5)
        assert numbers["update/loss"] == pytest.approx(metrics["update/loss"], rel=1e-6), layout


@pytest.mark.slow
def test_frozen_models_are_gathered_and_laid_out_as_their_tables_say(folder: Path) -> None:
    """The outputs of teachers have the same bits, gathered once or in each pass and over fewer ranks; and about the
    same with experts on other ranks, whether the policy has some or not."""
    table: dict[str, Any] = {**BOTH, "divergence": "jsd"}
    once: dict[str, Any] = {"reshard_after_forward": False}
    own = [{"rests_on": "host"}, once, {**once, "rests_on": "device"}, {**once, "parallel": {"dp_replicate": 2}}]
    cases: list[Case] = [(table, {}, {"models": one, "interrupted": True}) for one in own]
    experts: dict[str, Any] = {"teacher": "experts"}
    if HAS_EXPERT_PLANS:
        cases += [(experts, {}, {"models": {"parallel": {"ep": ep}}}) for ep in (1, 2)]
        cases += [(ONE, {"ep": ep}, {"student": "experts", "models": once}) for ep in (1, 2)]
    (_, of_each), *_ = found = run_ranks(2, _distil_each, folder, cases)[0]
    units = 2 * (3 + 1)  # of both teachers: their layers, and the rest
    assert of_each["passes"] > 1 and of_each["gathers"] == units * of_each["passes"] + 2  # and for their heads
    assert [numbers["gathers"] for _, numbers in found[1:4]] == [units, units, 0]
    for weights, numbers in found[1:4]:
        assert numbers["update/loss"] == of_each["update/loss"]
        assert all(torch.equal(weights[name], tensor) for name, tensor in found[0][0].items())
    for student, (alone, one), (shared, other) in zip(("student", "experts"), found[4::2], found[5::2], strict=False):
        assert other["update/loss"] == pytest.approx(one["update/loss"], rel=1e-6)
        assert_same_change(alone, shared, initial(str(folder / student)), 2e-5)


@pytest.mark.slow
def test_a_copy_follows_its_policy_on_every_layout_as_on_one_rank(folder: Path) -> None:
    table: dict[str, Any] = {"teacher": "average", "divergence": "forward"}
    layouts: list[tuple[str, dict[str, int]]] = [("student", {}), ("student", {"cp": 2}), ("student", {"tp": 2})]
    layouts += [("experts", {}), *([("experts", {"ep": 2})] if HAS_EXPERT_PLANS else [])]
    names = ["student", "experts"]
    alone = run_ranks(1, _distil_each, folder, [(table, {}, {"student": one, "rewarded": True}) for one in names])[0]
    cases = [(table, layout, {"student": one, "rewarded": True}) for one, layout in layouts]
    for (one, _), (weights, metrics) in zip(layouts, run_ranks(2, _distil_each, folder, cases)[0], strict=True):
        expected, numbers = alone[names.index(one)]
        assert metrics["update/grad_norm"] == pytest.approx(numbers["update/grad_norm"], rel=1e-5)
        assert_same_change(expected, weights, initial(str(folder / one)), 2e-5)


def test_two_teachers_are_the_sum_of_two_runs_with_one(folder: Path) -> None:
    table = {**BOTH, "divergence": "reverse"}
    cases: list[Case] = [(table, {}, {}), (table, {}, {"only": [0]}), (table, {}, {"only": [1]})]
    ((both, _), (one, _), (other, _)) = run_ranks(1, _distil_each, folder, cases)[0]
    start = initial(str(folder / "student"))
    summed = {name: one[name] + other[name] - start[name] for name in start}
    assert_same_change(both, summed, start, 1e-5)


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_teacher_that_sees_hints_reads_them_in_place_of_the_prompts(folder: Path, num_ranks: int) -> None:
    rng, sequences = random.Random(5), []
    for number, sequence in enumerate(_sequences()):
        prompt = sequence.loss_mask.index(True)
        words = tuple(rng.randrange(2, VOCABULARY) for _ in range(rng.randint(1, 20)))
        hint = Hint(prompt, words) if number % 3 else Hint()
        sequences.append(dataclasses.replace(sequence, teacher=0, hint=hint))
    of = {"hint_column": "hint", "divergence": "forward"}
    names = ["big", "policy", "student"]
    cases: list[Case] = [({"teacher": name, **of}, {}, {"sequences": sequences}) for name in names]
    found = run_ranks(num_ranks, _distil_each, folder, cases)[0]
    start = initial(str(folder / "student"))
    for name, (weights, _) in zip(names, found, strict=True):
        path = name.replace("policy", "student")
        expected, _ = _whole_vocabulary(folder, "forward", 0.5, [(path, 1.0)], sequences)
        assert_same_change(expected, weights, start, 2e-5)
    assert all(torch.equal(found[1][0][name], found[2][0][name]) for name in start)


def test_sources_with_an_algorithm_are_distilled_by_themselves(folder: Path) -> None:
    """One teacher of two sources: each has denominators of its own, for rewards and divergences."""
    sources = [dataclasses.replace(one, algorithm=number % 2) for number, one in enumerate(_sequences())]
    alone = [
        [
            dataclasses.replace(one, algorithm=0, loss_mask=tuple(x and one.algorithm == place for x in one.loss_mask))
            for one in sources
        ]
        for place in range(2)
    ]
    style = Algorithm(AdvantageConfig(), loss_config(aggregation="constant"), CorrectionConfig(), "style", weight=0.5)
    table = {**ONE, "divergence": "reverse", "coef": 0.7}
    cases: list[Case] = [
        (table, {}, {"rewarded": True, "sequences": sources, "others": [style]}),
        (table, {}, {"rewarded": True, "sequences": alone[0]}),
        (table, {}, {"rewarded": True, "sequences": alone[1], "aggregation": "constant"}),
    ]
    ((both, _), (first, _), (second, _)) = run_ranks(1, _distil_each, folder, cases)[0]
    start = initial(str(folder / "student"))
    summed = {name: first[name] + 0.5 * (second[name] - start[name]) for name in start}
    assert_same_change(both, summed, start, 1e-5)


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_teacher_looks_at_images_with_its_own_tower(tmp_path: Path, num_ranks: int) -> None:
    path = save_qwen3_vl(tmp_path / "student")
    save_qwen3_vl_moe(tmp_path / "big")
    sequences, pictures = mixed_sequences(path)
    sequences, _ = stored(sequences, pictures, tmp_path / "images")
    student, teacher = (
        AutoModelForImageTextToText.from_pretrained(tmp_path / name, attn_implementation="eager", dtype=torch.float32)
        for name in ("student", "big")
    )
    start = {name: p.detach().clone() for name, p in student.named_parameters() if ".visual." not in name}
    found = []
    for sequence in sequences:
        inputs = inputs_of(path, sequence, pictures)
        s = student(**inputs, use_cache=False).logits[0, :-1].div(TEMPERATURE).log_softmax(-1)
        with torch.no_grad():
            t = teacher(**inputs, use_cache=False).logits[0, :-1].div(TEMPERATURE).log_softmax(-1)
        found.append(_divergence(s, t, "forward", 0.5)[torch.tensor(sequence.loss_mask)[1:]])
    torch.cat(found).mean().backward()
    expected = {name: (p - p.grad).detach() for name, p in student.named_parameters() if name in start}
    changes = {"sequences": sequences, "store": tmp_path / "images"}
    layouts: list[dict[str, int]] = [{}] if num_ranks == 1 else [{}, {"cp": 2}, {"tp": 2}]
    cases: list[Case] = [({**ONE, "divergence": "forward"}, layout, changes) for layout in layouts]
    for weights, metrics in run_ranks(num_ranks, _distil_each, tmp_path, cases)[0]:
        assert metrics["update/loss"] == pytest.approx(float(torch.cat(found).mean()), rel=1e-5)
        assert_same_change(expected, weights, start, 2e-5)


def test_what_environments_said_is_not_distilled_and_may_be_learned_beside(folder: Path) -> None:
    sequences = []
    for sequence in _sequences():
        start, end = sequence.loss_mask.index(True), len(sequence.token_ids)
        said = range(start + (end - start) // 3, start + 2 * (end - start) // 3)
        mask = tuple(trained and place not in said for place, trained in enumerate(sequence.loss_mask))
        spans = ((0, start, said.start), (1, said.stop, end))
        turns = tuple(TurnSpan(number=number, start=first, end=last) for number, first, last in spans)
        sequences.append(dataclasses.replace(sequence, loss_mask=mask, turns=turns))
    table = {**BOTH, "divergence": "reverse"}
    both: dict[str, Any] = {"sequences": sequences, "environment_coef": 0.7}
    cases: list[Case] = [(table, {}, both), (table, {}, both | {"only": []}), (table, {}, {"sequences": sequences})]
    ((together, _), (said_alone, _), (taught_alone, numbers)) = run_ranks(1, _distil_each, folder, cases)[0]
    start_weights = initial(str(folder / "student"))
    summed = {name: said_alone[name] + taught_alone[name] - start_weights[name] for name in start_weights}
    assert_same_change(together, summed, start_weights, 1e-5)
    assert numbers["distill/reverse_nats"] > 0


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_policys_own_base_teaches_as_a_copy_of_it_does(folder: Path, num_ranks: int) -> None:
    of = {"divergence": "jsd", "teacher_temperature": 1.3}
    cases: list[Case] = [
        ({"teacher": "base", **of}, {}, {"lora": "moved"}),
        ({"teacher": "student", **of}, {}, {"lora": "moved"}),
        ({"teacher": "base", **of, "top_k": 9}, {}, {"lora": "moved"}),
        ({"teacher": "student", **of, "top_k": 9}, {}, {"lora": "moved"}),
        ({"teacher": "base", "divergence": "jsd"}, {}, {"lora": "at its start"}),
    ]
    *found, (_, nothing) = run_ranks(num_ranks, _distil_each, folder, cases)[0]
    for (own, numbers), (copied, others) in (found[:2], found[2:]):
        assert numbers == others and numbers["update/grad_norm"] > 0
        assert all(torch.equal(own[name], copied[name]) for name in copied)
    assert nothing["update/loss"] == 0.0 and nothing["update/grad_norm"] == 0.0


@pytest.mark.parametrize("kind", ["reverse", "forward", "jsd"])
def test_the_policy_itself_teaches_nothing(folder: Path, kind: str) -> None:
    itself = {"teacher": "student", "divergence": kind}
    cases: list[Case] = [(itself, {}, {}), ({**itself, "top_k": 5}, {}, {})]
    start = initial(str(folder / "student"))
    for weights, metrics in run_ranks(1, _distil_each, folder, cases)[0]:
        assert metrics["update/loss"] == 0.0 and metrics["update/grad_norm"] == 0.0
        assert all(torch.equal(weights[name], tensor) for name, tensor in start.items())
