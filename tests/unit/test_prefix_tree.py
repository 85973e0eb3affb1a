"""Sequences that begin alike, computed as a tree, give what they give when each is computed by itself."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, Gemma3Config

from spmdrl.algo.prefix_tree import BLOCK_TOKENS, block_hashes, compared_tokens, prefix_tree, shared_tokens
from spmdrl.config import LoraConfig
from spmdrl.dist.exchange import SequenceInfo
from spmdrl.model.attention_layer import AttentionLayer
from spmdrl.model.kernels import Kernel, SequenceLayout, causal_attention
from spmdrl.model.layers import replace_layers
from spmdrl.model.lora.layers import Pair
from spmdrl.model.lora.targets import targets_of
from spmdrl.model.operators import operators_of
from spmdrl.model.policy import Critic, Policy, RewardModel
from spmdrl.model.routes import Routers
from spmdrl.model.tree_attention import chunk_of_tree, tree_attention, tree_problems
from spmdrl.model.trunk import attention_of, model_class
from spmdrl.step.batch import lay_end_to_end
from spmdrl.step.units import pack_over_places
from spmdrl.types import MicroBatch, PrefixTree
from tests.helpers import flash_on_cpu, models, vision_models
from tests.helpers.configs import plan_for
from tests.helpers.trees import sequences_of_trees


def tree_of(sequences: list[tuple[int, ...]]) -> PrefixTree:
    tree = prefix_tree(sequences)
    assert tree is not None
    return tree


def paths(tree: PrefixTree) -> list[list[int]]:
    """The rows of each node and of all above it."""
    starts, found = [0, *accumulate(tree.lengths)], []
    for node, parent in enumerate(tree.parents):
        above = found[parent] if parent >= 0 else []
        found.append([*above, *range(starts[node], starts[node + 1])])
    return found


@pytest.mark.parametrize("seed", range(5))
def test_each_sequence_is_a_path_of_a_tree_in_which_no_block_is_twice(seed: int) -> None:
    sequences = [sequence.token_ids for sequence in sequences_of_trees(12, seed=seed)]
    tree, tokens = tree_of(sequences), torch.tensor([token for one in sequences for token in one])
    assert torch.equal(tokens[tree.tokens][tree.rows], tokens)
    starts = [0, *accumulate(map(len, sequences))]
    every = {tuple(path) for path in paths(tree)}
    for start, end in pairwise(starts):
        assert tuple(tree.rows[start:end].tolist()) in every
    blocks = {one[:end] for one in sequences for end in range(BLOCK_TOKENS, len(one) + 1, BLOCK_TOKENS)}
    rests = sum(len(one) % BLOCK_TOKENS for one in sequences)
    assert sum(tree.lengths) == len(tree.tokens) == BLOCK_TOKENS * len(blocks) + rests


def test_what_sequences_share_is_known_from_the_hashes_of_their_blocks() -> None:
    sequences = [sequence.token_ids for sequence in sequences_of_trees(12)]
    for one in sequences:
        for other in sequences:
            alike = sum(a == b for a, b in zip(block_hashes(one), block_hashes(other), strict=False))
            assert BLOCK_TOKENS * alike == shared_tokens(one, other)


def test_nothing_is_shared_where_no_block_is() -> None:
    assert prefix_tree([]) is None and prefix_tree([(1, 2, 3), (1, 2, 3)]) is None


# --- attention -------------------------------------------------------------------------------------------------------

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 20},
    "sinks": {"sinks": True},
    "sinks and window": {"sinks": True, "window": 3},
    "cap": {"softcap": 0.7},
}
CASES = [
    *[(kernel, name) for kernel in ("sdpa", "varlen") for name in LAYERS],
    *[(kernel, name) for kernel in ("flash_attn_2", "flash_attn_3") for name in ("plain", "window", "cap")],
]


@pytest.fixture(autouse=True)
def flash_attn(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("flash_attn", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, module, flash_on_cpu)


def gradients(attend: Callable[..., Tensor], leaves: tuple[Tensor, ...]) -> list[Tensor]:
    leaves = tuple(leaf.clone().requires_grad_() for leaf in leaves)
    out = attend(*leaves)
    slope = torch.linspace(-1, 1, out.numel()).view(out.shape)
    return [out.detach(), *torch.autograd.grad((out * slope).sum(), leaves, materialize_grads=True)]


@pytest.mark.parametrize(("kernel", "name"), CASES)
@pytest.mark.parametrize("seed", [0, 1])
def test_attention_over_a_tree_is_that_over_its_sequences(kernel: Kernel, name: str, seed: int) -> None:
    sequences = [sequence.token_ids for sequence in sequences_of_trees(9, seed=seed)]
    tree = tree_of(sequences)
    seqlens = [*map(len, sequences)]
    dtype = torch.float64 if kernel == "sdpa" else torch.float32
    torch.manual_seed(seed)
    shapes = [(len(tree.tokens), heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    leaves = *(torch.randn(shape, dtype=dtype) for shape in shapes), torch.randn(HEADS, dtype=dtype)
    settings = LAYERS[name]
    over_tree = tree_attention(tree, kernel, torch.device("cpu"))
    over_sequences = causal_attention(SequenceLayout(seqlens, torch.tensor([0, *seqlens]).cumsum(0).int()), kernel)

    def layer(sinks: Tensor) -> AttentionLayer:
        given = sinks if settings.get("sinks") else None
        return AttentionLayer(
            index=0, scale=0.3, window=settings.get("window"), softcap=settings.get("softcap"), sinks=given
        )

    def as_tree(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        return over_tree(q, k, v, layer(sinks))[tree.rows]

    def in_chunks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        found = []
        for chunk in pairwise([0, 33, 50, len(q)]):
            layout, keys = chunk_of_tree(tree, chunk, settings.get("window"), q.device)
            found.append(causal_attention(layout, kernel)(q[slice(*chunk)], k[keys], v[keys], layer(sinks)))
        return torch.cat(found)[tree.rows]

    def flat(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        return over_sequences(*(x[tree.rows] for x in (q, k, v)), layer(sinks))

    bound = 1e-10 if dtype == torch.float64 else 2e-5
    expected = gradients(flat, leaves)
    for found in (as_tree, in_chunks):
        for one, other in zip(gradients(found, leaves), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=bound)


# --- models ----------------------------------------------------------------------------------------------------------

MODELS: dict[str, Callable[..., str]] = {
    "qwen3": models.save_qwen3,
    "gpt_oss": models.save_gpt_oss,
    "gemma3": models.save_gemma3,
    "qwen3_5": models.save_qwen3_5,
    **{
        name: lambda path, name=name, **changes: models.save_other(name, path, **changes)
        for name in ("gemma2", "nemotron_h", "lfm2", "falcon_h1", "deepseek_v3")
    },
}
BOUNDS = {torch.float32: 1e-5, torch.float64: 1e-6}


def policy_of(path: str, dtype: torch.dtype) -> Policy:
    config = AutoConfig.from_pretrained(path)
    model = model_class(config).from_pretrained(path, attn_implementation=attention_of(config), dtype=dtype).eval()
    if dtype == torch.float64:
        model.set_experts_implementation("eager")  # grouped products know no float64
    replace_layers(model, operators_of("sdpa"))
    return Policy(model, kernel="sdpa", temperature=0.8, logits_chunk_tokens=64)


def outcome(policy: Policy, micro_batch: MicroBatch) -> dict[str, Tensor]:
    scores = policy(micro_batch)
    slope = torch.linspace(-1, 1, len(scores.logprobs))
    (slope * (scores.logprobs + 0.3 * scores.entropy)).sum().backward()
    found = {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}
    policy.zero_grad(set_to_none=True)
    return {"logprobs": scores.logprobs.detach(), "entropy": scores.entropy.detach(), **found}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("qwen3", "gpt_oss", "qwen3_5", "nemotron_h") else pytest.mark.slow)
        for name in MODELS
    ],
)
def test_a_model_gives_of_a_tree_what_it_gives_of_its_sequences(name: str, tmp_path: Path) -> None:
    sequences = sequences_of_trees(9, seed=3)
    flat = lay_end_to_end(sequences, {})
    tree = lay_end_to_end(sequences, {}, shares_prefixes=True)
    assert tree.tree is not None and tree.num_computed < 0.8 * len(tree.token_ids)
    torch.testing.assert_close(tree.columns, flat.columns, rtol=0, atol=0, equal_nan=True)
    path = MODELS[name](tmp_path)
    for dtype, bound in BOUNDS.items():
        policy = policy_of(path, dtype)
        expected, found = outcome(policy, flat), outcome(policy, tree)
        assert expected.keys() == found.keys()
        for key, values in expected.items():
            apart = float((values - found[key]).norm() / values.norm().clamp(min=1e-3))
            assert apart <= bound, f"{name}, {key}: {apart:.1e} apart in {dtype}"


@pytest.mark.parametrize("name", ["qwen3", pytest.param("qwen3_5", marks=pytest.mark.slow)])
def test_adapters_learn_of_a_tree_what_they_learn_of_its_sequences(name: str, tmp_path: Path) -> None:
    sequences = sequences_of_trees(9, seed=3)
    flat, tree = (lay_end_to_end(sequences, {}, shares_prefixes=shares) for shares in (False, True))
    path = MODELS[name](tmp_path)
    for dtype, bound in BOUNDS.items():
        policy, leaves = policy_of(path, dtype), list[Tensor]()
        policy.requires_grad_(False)
        for target in targets_of(policy.model, LoraConfig().targets):
            a, b = (torch.randn(shape, dtype=dtype).mul_(0.1).requires_grad_() for shape in target.shapes(4))
            target.install(Pair(a, b), scale=2.0, is_on=lambda: True)
            leaves += [a, b]
        assert len(leaves) > 20
        gradients = []
        for micro_batch in (flat, tree):
            scores = policy(micro_batch)
            loss = (torch.linspace(-1, 1, len(scores.logprobs)) * (scores.logprobs + 0.3 * scores.entropy)).sum()
            gradients.append(torch.autograd.grad(loss, leaves))
        for one, other in zip(*gradients, strict=True):
            assert one.dtype == dtype and float((one - other).norm() / one.norm().clamp(min=1e-3)) <= bound


def test_a_critic_and_a_reward_model_score_a_tree_as_its_sequences(tmp_path: Path) -> None:
    sequences = sequences_of_trees(9, seed=3)
    flat, tree = (lay_end_to_end(sequences, {}, shares_prefixes=shares) for shares in (False, True))
    model = policy_of(models.save_qwen3(tmp_path), torch.float32).model
    critic = Critic(model, kernel="sdpa", device=torch.device("cpu"))
    torch.nn.init.normal_(critic.value_head.weight)
    torch.testing.assert_close(critic(tree), critic(flat), rtol=1e-5, atol=1e-5)
    model.score = critic.value_head
    scorer = RewardModel(model, kernel="sdpa")
    torch.testing.assert_close(scorer(tree), scorer(flat), rtol=1e-5, atol=1e-5)
    assert scorer(tree).any()


def test_images_are_shared_where_their_pixels_are(tmp_path: Path) -> None:
    path = vision_models.save_qwen3_vl(tmp_path)
    shown = [vision_models.picture(path, number) for number in range(3)]
    first = vision_models.sequence_with(path, *shown)
    sequences = [
        replace(first, index=index, token_ids=first.token_ids[:-7] + tuple(range(10 + index, 17 + index)))
        for index in range(4)
    ]
    flat, tree = (lay_end_to_end(sequences, {}, shares_prefixes=shares) for shares in (False, True))
    assert tree.tree is not None
    pixels = tuple(one.pixels for one in shown)
    for dtype, bound in BOUNDS.items():
        policy = policy_of(path, dtype)
        expected, found = (outcome(policy, replace(one, pixels=pixels)) for one in (flat, tree))
        assert any(".visual." in name for name in expected)
        for key, values in expected.items():
            assert float((values - found[key]).norm() / values.norm().clamp(min=1e-3)) <= bound, key
    (image, *others) = first.images
    other = replace(first, images=(replace(image, digest="0" * 32), *others))
    (shared,) = {shared_tokens(*map(compared_tokens, pair)) for pair in [(first, other), (other, first)]}
    assert shared <= image.start < shared_tokens(*map(compared_tokens, (first, sequences[1])))


def test_routes_are_those_of_the_tokens_and_where_they_differ_so_do_tokens(tmp_path: Path) -> None:
    sequences = sequences_of_trees(9, seed=3)
    flat, tree = (lay_end_to_end(sequences, {}, shares_prefixes=shares) for shares in (False, True))
    policy = policy_of(models.save_qwen3_moe(tmp_path), torch.float32)
    policy.routers = Routers(policy.model)
    expected = policy(flat).logprobs
    routes = policy.own_routes(flat)
    policy(tree)
    assert torch.equal(policy.own_routes(tree), routes)
    scores = policy(replace(tree, routes=routes))
    torch.testing.assert_close(scores.logprobs, expected, rtol=1e-5, atol=1e-5)
    assert scores.router_disagreement is not None and not scores.router_disagreement.any()
    of_each = routes.split([len(one.token_ids) for one in sequences])
    routed = [replace(one, routes=own) for one, own in zip(sequences, of_each, strict=True)]
    again = lay_end_to_end(routed, {}, shares_prefixes=True)
    assert again.tree is not None and tree.tree is not None and len(again.tree.tokens) == len(tree.tree.tokens)
    others = [replace(one, routes=one.routes + 10 * place) for place, one in enumerate(routed)]
    assert lay_end_to_end(others, {}, shares_prefixes=True).tree is None


# --- planning --------------------------------------------------------------------------------------------------------


def infos_of_groups(num_groups: int, group_size: int, *, prompt: int, response: int) -> list[SequenceInfo]:
    """Groups whose sequences share their prompts, of which all begin with the same block."""
    return [
        SequenceInfo(
            index=group * group_size + place,
            num_tokens=prompt + response,
            num_loss_tokens=response,
            rank=0,
            block_hashes=(0, *range(1000 * (group + 1), 1000 * (group + 1) + prompt // BLOCK_TOKENS - 1)),
        )
        for group in range(num_groups)
        for place in range(group_size)
    ]


def packed(infos: list[SequenceInfo], *, num_places: int, **plan: Any) -> Any:
    settings: dict[str, Any] = {"max_tokens_per_micro_batch": 1024, "shares_prefixes": True}
    return pack_over_places(infos, plan_for(len(infos), 1, **(settings | plan)), num_places=num_places, multiple=1)


def test_a_budget_counts_what_is_shared_once() -> None:
    infos = infos_of_groups(4, 8, prompt=128, response=16)
    found = packed(infos, num_places=2)
    assert found.shares_prefixes
    assert sorted(info.index for of_place in found.infos for info in of_place) == list(range(32))
    tokens = [[sum(unit.num_tokens for unit in in_bin) for in_bin in bins] for bins in found.bins]
    assert tokens == [[2 * 256 - 16], [2 * 256 - 16]]
    flat = packed(infos, num_places=2, shares_prefixes=False)
    assert len(flat.bins[0]) == 3 and found.elapsed < 0.3 * flat.elapsed


def test_one_group_on_several_places_is_split_where_that_is_faster() -> None:
    found = packed(infos_of_groups(1, 8, prompt=64, response=64), num_places=2)
    assert [sum(len(unit.infos) for unit in bins[0]) for bins in found.bins] == [4, 4]


def test_nothing_changes_where_little_would_be_saved() -> None:
    infos = infos_of_groups(4, 4, prompt=16, response=400)
    flat = packed(infos, num_places=2, shares_prefixes=False)
    assert packed(infos, num_places=2) == flat


def test_pairs_share_their_prompts_and_stay_side_by_side() -> None:
    infos = infos_of_groups(6, 2, prompt=64, response=16)
    found = packed(infos, num_places=3, sequences_together=2, max_tokens_per_micro_batch=160)
    assert found.shares_prefixes and found.costs == [[96, 96]] * 3
    for of_place in found.infos:
        for first, second in zip(*[iter(of_place)] * 2, strict=True):
            assert first.index % 2 == 0 and second.index == first.index + 1


def test_attention_is_counted_once_as_well() -> None:
    (unit,) = packed(infos_of_groups(1, 2, prompt=64, response=32), num_places=1, cost_per_squared_token=1).bins[0][0]
    assert unit.num_tokens == 64 + 2 * 32
    assert unit.cost == 2 * (96 + 96**2) - (64 + 64**2)


def test_a_planned_micro_batch_is_not_smaller_than_its_tree() -> None:
    for seed in range(5):
        sequences = sequences_of_trees(12, seed=seed)
        infos = [
            SequenceInfo(
                index=one.index,
                num_tokens=len(one.token_ids),
                num_loss_tokens=1,
                rank=0,
                block_hashes=block_hashes(one.token_ids),
            )
            for one in sequences
        ]
        found = packed(infos, num_places=2, max_tokens_per_micro_batch=200)
        assert found.shares_prefixes
        for in_bin in (in_bin for bins in found.bins for in_bin in bins):
            together = [sequences[info.index] for unit in in_bin for info in unit.infos]
            planned = sum(unit.num_tokens for unit in in_bin)
            assert lay_end_to_end(together, {}, shares_prefixes=True).num_computed <= planned <= 200


@pytest.mark.parametrize("multiple", [4, 7])
def test_filling_is_no_part_of_a_tree(multiple: int) -> None:
    sequences = [replace(one, token_ids=(0,) * len(one.token_ids)) for one in sequences_of_trees(4)]
    micro_batch = lay_end_to_end(sequences, {}, multiple=multiple, shares_prefixes=True)
    assert micro_batch.num_computed % multiple == 0 and micro_batch.tree is not None
    if micro_batch.sequence_index[-1] < 0:
        own = micro_batch.tree.rows[micro_batch.cu_seqlens[-2] :]
        others = micro_batch.tree.rows[: micro_batch.cu_seqlens[-2]]
        assert not set(own.tolist()) & set(others.tolist())


def test_models_that_cannot_share_say_why() -> None:
    by_length = models.config_of("phi3")
    assert [*tree_problems(by_length, 20)] == []
    (sentence,) = tree_problems(by_length, 21)
    assert sentence == (
        'pack.prefix_tree = "auto", but phi3 gives sequences beyond 20 tokens other rotary frequencies; set it to "off"'
    )
    assert "see each other" in "".join(tree_problems(Gemma3Config(), 20))
    assert [*tree_problems(models.config_of("nemotron_h"), 1000)] == []
