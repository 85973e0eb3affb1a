"""Each sequence has the rotary frequencies of its own length, whatever else is in its pack or in the engine's cache."""

from __future__ import annotations

import copy
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PhimoeConfig, PreTrainedModel

from spmdrl.engine.sglang.models import rotary_problems
from spmdrl.engine.torch.engine import TorchEngine
from spmdrl.model.attention import IMPLEMENTATION
from spmdrl.model.layers import replace_layers
from spmdrl.model.operators import operators_of
from spmdrl.model.policy import Policy
from spmdrl.model.rotary import changes_after, length_problems
from spmdrl.refit.refit import load_whole
from spmdrl.types import Request, UserError
from tests.helpers.conversations import conversations, count_read
from tests.helpers.exact import exchanges, packed, whole
from tests.helpers.models import EXPERTS, SIZES, longrope, save_llama, save_model, save_phi3, save_qwen3

LIMIT = 64
TEMPERATURE = 0.8
DYNAMIC: dict[str, Any] = {
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    "max_position_embeddings": LIMIT,
}
BOTH_SIDES = [70, 9, LIMIT, 90, LIMIT + 1, 1, 71]


def save_phimoe(path: Path) -> str:
    """A random PhiMoE, whose queries and keys are also scaled by length."""
    scales = {"short_mscale": 1.1, "long_mscale": 1.3}
    sizes = SIZES | EXPERTS | {"num_local_experts": 5, "hidden_size": 64} | longrope(LIMIT, num_factors=8, **scales)
    return save_model(path, PhimoeConfig(**sizes))


MODELS = {
    "phi3": lambda path: save_phi3(path, limit=LIMIT),
    "llama dynamic": lambda path: save_llama(path, **DYNAMIC),
    "qwen3": lambda path: save_qwen3(path, **longrope(LIMIT, num_factors=8)),
    "phimoe": save_phimoe,
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    path = MODELS[request.param](tmp_path_factory.mktemp("model"))
    return AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()


def sequences_of(seqlens: list[int], vocabulary: int) -> list[tuple[int, ...]]:
    torch.manual_seed(1)
    return [tuple(torch.randint(2, vocabulary, (length,)).tolist()) for length in seqlens]


def alone(model: PreTrainedModel, token_ids: tuple[int, ...], *, temperature: float = TEMPERATURE) -> Tensor:
    """Log-probabilities by transformers alone; a copy, because its modules remember the longest sequence so far."""
    ids = torch.tensor(token_ids)
    log_p = (copy.deepcopy(model)(ids[None], use_cache=False).logits[0] / temperature).log_softmax(-1)
    return torch.nn.functional.pad(log_p[:-1].gather(1, ids[1:, None])[:, 0], (1, 0))


def policy_of(model: PreTrainedModel) -> Policy:
    own = AutoModelForCausalLM.from_config(copy.deepcopy(model.config), attn_implementation=IMPLEMENTATION).eval()
    own.load_state_dict(model.state_dict())
    replace_layers(own, operators_of("sdpa"))
    return Policy(own, kernel="sdpa", temperature=TEMPERATURE, logits_chunk_tokens=2048)


def require_alone(model: PreTrainedModel, seqlens: list[int]) -> None:
    """Require that a pack gives each sequence's log-probabilities and the sum of all gradients."""
    sequences, policy = sequences_of(seqlens, model.config.vocab_size), policy_of(model)
    weights = torch.linspace(-1, 1, sum(seqlens))
    for _ in range(2):  # what one pass leaves must not show in the next
        policy.zero_grad()
        found = policy(packed(sequences)).logprobs
        (found * weights).sum().backward()
    assert policy.model.config.rope_parameters == model.config.rope_parameters  # of which an export is made
    gradients: dict[str, Tensor] = {}
    for ids, part, weight in zip(sequences, found.split(seqlens), weights.split(seqlens), strict=True):
        own = copy.deepcopy(model)
        own.requires_grad_()
        expected = alone(model, ids)
        torch.testing.assert_close(part, expected, rtol=0, atol=1e-5)
        ids_of = torch.tensor(ids)
        log_p = (own(ids_of[None], use_cache=False).logits[0] / TEMPERATURE).log_softmax(-1)
        (log_p[:-1].gather(1, ids_of[1:, None])[:, 0] * weight[1:]).sum().backward()
        for name, parameter in own.named_parameters():
            if parameter.grad is not None:
                gradients[name] = gradients.get(name, 0) + parameter.grad
    for name, parameter in policy.model.named_parameters():
        error = (parameter.grad - gradients[name]).norm() / gradients[name].norm()
        assert error < 1e-5, f"{name}: {error:.1e}"


def test_packed_is_alone_on_both_sides_of_the_limit(model: PreTrainedModel) -> None:
    require_alone(model, BOTH_SIDES)


def engine_of(model: PreTrainedModel, max_running: int = 4) -> TorchEngine:
    engine = TorchEngine(
        model.config, device=torch.device("cpu"), dtype=torch.float32, kernel="sdpa", max_running=max_running
    )
    load_whole(engine, dict(model.named_parameters()), version=0)
    return engine


def test_the_engine_is_the_trainer_on_both_sides_of_the_limit(model: PreTrainedModel) -> None:
    """Prompts beyond the limit beside short ones, in prefills and in decode steps; responses end at different times."""
    is_dynamic = model.config.rope_parameters["rope_type"] == "dynamic"
    prompts = sequences_of([5, 20, LIMIT - 6] if is_dynamic else [70, 5, LIMIT - 6, LIMIT + 1, 20], 97)
    asked = [
        Request(prompt_ids=prompts[i // 2], seed=i, max_response_tokens=3 + i % 4, temperature=TEMPERATURE)
        for i in range(2 * len(prompts))
    ]
    for request, response in exchanges(engine_of(model), asked):
        expected = alone(model, whole((request, response)))[-len(response.token_ids) :]
        torch.testing.assert_close(torch.tensor(response.logprobs), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["phi3", "qwen3", "phimoe"])
def test_an_episode_that_grows_beyond_the_limit_is_read_again_once(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = AutoModelForCausalLM.from_pretrained(MODELS[name](tmp_path), attn_implementation="eager").eval()
    first, said = sequences_of([10, 25], 97)
    begin = Request(prompt_ids=first, seed=0, max_response_tokens=4, cache_on_finish=frozenset({"length"}))
    engine = engine_of(model)
    read = count_read(engine, monkeypatch)
    turns = conversations(engine, [begin], [said], num_turns=4)  # of 10, 39, 68 and 97 tokens before their responses
    assert read == [10, 1 + 25, 68, 1 + 25]
    for request, response in turns:
        expected = alone(model, whole((request, response)), temperature=1.0)[-len(response.token_ids) :]
        torch.testing.assert_close(torch.tensor(response.logprobs), expected.detach(), rtol=0, atol=1e-5)


def test_a_response_that_may_cross_the_limit_is_refused(model: PreTrainedModel) -> None:
    is_dynamic = model.config.rope_parameters["rope_type"] == "dynamic"
    engine = engine_of(model)
    for length, crosses in ((LIMIT - 5, False), (LIMIT - 4, True), (LIMIT, True), (LIMIT + 1, is_dynamic)):
        request = Request(prompt_ids=tuple(range(2, 2 + length)), seed=0, max_response_tokens=5)
        if crosses:
            with pytest.raises(UserError, match=f"beyond {LIMIT} tokens\\); lower max_response_tokens"):
                list(engine.generate([request]))
        else:
            list(engine.generate([request]))


def test_runs_that_may_cross_the_limit_are_refused_by_name(tmp_path: Path) -> None:
    def problems(model_type: str, longest: int, *, are_sampled: bool) -> list[str]:
        config = AutoConfig.from_pretrained(MODELS[model_type](tmp_path / f"{model_type}{longest}{are_sampled}"))
        assert changes_after(config) == LIMIT
        return list(length_problems(config, longest, are_sampled=are_sampled))

    assert not problems("phi3", LIMIT, are_sampled=True)
    assert not problems("phi3", LIMIT + 1, are_sampled=False)
    (sentence,) = problems("phi3", LIMIT + 1, are_sampled=True)
    assert f"beyond {LIMIT} this model (phi3) has other rotary frequencies from the first token on" in sentence
    assert f"lower them to {LIMIT} together, or give the model one set of frequencies" in sentence
    (sentence,) = problems("phimoe", LIMIT + 1, are_sampled=False)
    assert "transformers leaves out the long factors of phimoe's longrope" in sentence
    config = AutoConfig.from_pretrained(save_phi3(tmp_path / "judge", limit=LIMIT))
    (sentence,) = length_problems(config, LIMIT + 1, are_sampled=True, allowed_by="max_question_tokens")
    assert sentence.startswith(f"max_question_tokens allow sequences of {LIMIT + 1} tokens, and beyond {LIMIT} this")
    assert changes_after(LlamaConfig()) is None


def test_long_factors_for_all_lengths_are_written_as_the_page_shows(tmp_path: Path) -> None:
    path = save_phi3(tmp_path, limit=LIMIT)
    before = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    page = (Path(__file__).parents[2] / "docs/models.md").read_text(encoding="utf-8")
    start = page.index("    import json, math, pathlib\n")
    exec(textwrap.dedent(page[start : page.index("\n\n", start)]), {"DIR": path})
    after = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    assert changes_after(after.config) == after.config.max_position_embeddings == 256
    assert not list(length_problems(after.config, 256, are_sampled=True))
    assert not list(rotary_problems(path, after.config))
    (long,) = sequences_of([LIMIT + 1], 97)
    with torch.no_grad():
        torch.testing.assert_close(alone(after, long), alone(before, long), rtol=0, atol=1e-6)
        begins = alone(after, long[:LIMIT])  # now a part of the long one, which it was not
        torch.testing.assert_close(begins, alone(before, long)[:LIMIT], rtol=0, atol=1e-5)
        assert (alone(before, long[:LIMIT]) - begins).abs().max() > 0.01


@pytest.mark.slow
def test_packed_is_alone_with_the_settings_of_phi_4_mini(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128}
    sizes |= {"num_hidden_layers": 1, "initializer_range": 0.05}
    rope = {"max_position_embeddings": 131072} | longrope(4096)
    path = save_phi3(tmp_path, limit=4096, **sizes, **rope)
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    require_alone(model, [4200, 300, 75])
    prompts = sequences_of([4190, 290, 65], 97)
    asked = [
        Request(prompt_ids=ids, seed=i, max_response_tokens=10, temperature=TEMPERATURE)
        for i, ids in enumerate(prompts)
    ]
    for request, response in exchanges(engine_of(model), asked):
        expected = alone(model, whole((request, response)))[-len(response.token_ids) :]
        torch.testing.assert_close(torch.tensor(response.logprobs), expected.detach(), rtol=0, atol=1e-5)
