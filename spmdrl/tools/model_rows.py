"""The rows of the verdict of `spmdrl model`, in order; each compares a way to compute with transformers' eager code."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.util import find_spec
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from spmdrl.config import Config, LoraConfig, ModelConfig, PackConfig, ParallelConfig
from spmdrl.config.plan import make_plan
from spmdrl.dist.launcher import free_port
from spmdrl.dist.mesh import build_meshes
from spmdrl.dist.session import World, spmd_session
from spmdrl.engine.protocol import EngineDied, RolloutEngine
from spmdrl.engine.sglang.engine import SGLangEngine
from spmdrl.engine.sglang.models import attention_without_packages
from spmdrl.engine.sglang.options import sglang_options
from spmdrl.engine.sglang.transport import wanted_transport
from spmdrl.engine.torch.engine import TorchEngine
from spmdrl.families import sglang_window, vision_family
from spmdrl.model.few_bits import quantization_refusal
from spmdrl.model.layer_kinds import recurrent_layers
from spmdrl.model.load import load_model_config, load_policy, weights_of
from spmdrl.model.lora.policy import load_trained, random_values
from spmdrl.model.rotary import changes_after
from spmdrl.refit.refit import RefitMismatch, load_whole, make_refit
from spmdrl.step.export import export_hf
from spmdrl.tools.model_scores import (
    TEMPERATURE,
    Layout,
    Scores,
    difference,
    eager_logprobs,
    eager_model,
    eager_scores,
    first_difference,
    scores,
    sequences,
    settings_of,
)
from spmdrl.tools.model_shrink import save_processor
from spmdrl.tools.model_source import ModelSource
from spmdrl.tools.parity_cases import BOUND, MOST, TIMES_ONE_BIT
from spmdrl.tools.program import ignored_interrupts
from spmdrl.types import Request, UserError
from spmdrl.types import Sequence as Tokens

RowAnswer = Literal["yes", "no", "refused"]
_ONE_BIT = "weights one bit apart give {:.0e} and {:.0e}"
_LORA = LoraConfig(rank=4, alpha=4.0)
_PROMPT_TOKENS, _RESPONSE_TOKENS = 50, 20  # of what engines sample
_MOST_TOKENS = _PROMPT_TOKENS + _RESPONSE_TOKENS
RANKS = 2

# Settings that change what a part of a model computes, most telling first; the part's name has one of the words.
_SETTINGS: Mapping[tuple[str, ...], str] = {
    ("head",): "final_logit_softcapping logit_scale logits_scaling lm_head_multiplier tie_word_embeddings",
    ("embedding",): "embedding_multiplier scale_embedding",
    ("mlp", "moe", "expert", "feed_forward", "mixer"): "norm_topk_prob routed_scaling_factor scoring_func topk_method "
    "n_group num_experts_per_tok swiglu_limit hidden_act",
    ("attn", "attention"): "attn_logit_softcapping attention_multiplier query_pre_attn_scalar sliding_window "
    "partial_rotary_factor rope_parameters use_qk_norm",
    ("",): "residual_multiplier rms_norm_eps",
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer to one question about a model."""

    question: str
    answer: RowAnswer
    remark: str = ""


Found = tuple[RowAnswer, str]


class Subject:
    """The tiny model of a source, and what is computed of it once."""

    def __init__(self, source: ModelSource, path: Path, *, dtype: str = "float32") -> None:
        """`path` is the directory of the tiny model; SGLang computes in `dtype`."""
        self.source, self.path, self.dtype = source, str(path), dtype
        self.batch = sequences()

    @cached_property
    def expected(self) -> Scores:
        """The scores by transformers' eager code, a sequence at a time."""
        return eager_scores(self.path, self.batch)

    @cached_property
    def rounding(self) -> tuple[float, float]:
        """The change of log-probabilities and of gradients by weights one bit apart: nothing can agree better."""
        moved = eager_scores(self.path, self.batch, moved=True)
        return difference(moved, self.expected)[:2]

    @property
    def allowed(self) -> tuple[float, float]:
        """The differences of log-probabilities and of gradients that are rounding."""
        value, gradient = (max(BOUND, min(TIMES_ONE_BIT * size, MOST)) for size in self.rounding)
        return value, gradient

    @cached_property
    def of_two_ranks(self) -> Mapping[str, Scores | str]:
        """The scores by two ranks in every layout; a sentence for one that the model does not support."""
        found: list[dict[str, Any]] = on_two_ranks(_on_rank, self.path)
        first, second = found
        return {
            name: part if isinstance(part, str) else Scores(second[name].logprobs | part.logprobs, part.gradients)
            for name, part in first.items()
        }


_TWO_RANKS: Mapping[str, Layout] = {
    "two ranks (fsdp)": Layout(RANKS),
    "cp 2, all_gather": Layout(RANKS, ParallelConfig(cp=2)),
    "cp 2, ulysses": Layout(RANKS, ParallelConfig(cp=2, cp_style="ulysses")),
    "tp 2": Layout(RANKS, ParallelConfig(tp=2)),
    "ep 2": Layout(RANKS, ParallelConfig(ep=2)),
}


def _on_rank(path: str) -> dict[str, Scores | str]:
    transformers_logging.disable_progress_bar()
    found: dict[str, Scores | str] = {}
    with spmd_session(threads_per_rank=1, deterministic=True) as world:
        for name, layout in _TWO_RANKS.items():
            try:
                found[name] = scores(path, layout, sequences(), world)
            except UserError as error:  # raised on every rank
                found[name] = " ".join(str(error).split())
    return found


def _has_experts(config: Any) -> bool:
    """True where there is something for parallel.ep to distribute."""
    text = config.get_text_config()
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts")
    return any(getattr(text, name, None) for name in names)


def _weights(subject: Subject, _: World) -> Found:
    if (method := subject.source.quantization) is None:
        return "yes", ""
    refusal = quantization_refusal({"quant_method": method})
    return ("refused", refusal) if refusal else ("yes", f"{method}, read as bfloat16")


def _one_rank(layout: Layout, subject: Subject, world: World) -> Found:
    found = scores(subject.path, layout, subject.batch, world)
    return _compared(found, subject, partial(_parting, subject, world))


def _parting(subject: Subject, world: World) -> str:
    """Name the first part and token where packed and eager part, and the setting that is likely the reason."""
    policy = load_policy(settings_of(subject.path), build_meshes(world).model, temperature=TEMPERATURE)
    part, place, token = first_difference(subject.path, policy, subject.batch, bound=subject.allowed[0])
    if place > 0 and ":" in part and token < len(subject.batch[place].token_ids) // 2:  # and the first sequence agrees
        likely = "a state that leaks from the sequence before, or a mask that lets it be seen"
    elif "attn" in part and token >= 64:
        likely = f"positions from {token} on"
    else:
        likely = ", ".join(_settings_of(subject, part)) or "the code of this part"
    return f"first in {part}, token {token} of sequence {place}; likely: {likely}"


def _settings_of(subject: Subject, part: str) -> Iterator[str]:
    text = subject.source.config.get_text_config()
    names = next(names for words, names in _SETTINGS.items() if any(word in part for word in words))
    for name in names.split():
        if (value := getattr(text, name, None)) is not None:
            yield f"{name} = {value}"


def _two_ranks(name: str, subject: Subject, _: World) -> Found:
    found = subject.of_two_ranks[name]
    if isinstance(found, str):
        return "refused", found
    return _compared(found, subject, lambda: "where one rank agrees, the layout is the reason")


def _compared(found: Scores, subject: Subject, why: Callable[[], str]) -> Found:
    value, gradient, name = difference(found, subject.expected)
    apart = f"{value:.0e} nats, gradients {gradient:.0e}"
    if value < BOUND and gradient < BOUND:
        return "yes", apart
    if value < subject.allowed[0] and gradient < subject.allowed[1]:
        return "yes", f"{apart}; {_ONE_BIT.format(*subject.rounding)}"
    return "no", f"{apart}: {why() if value >= subject.allowed[0] else f'the gradient of {name}'}"


def _close(worst: float, subject: Subject, more: str = "") -> Found:
    """Judge log-probabilities that differ by up to `worst`."""
    if worst < BOUND:
        return "yes", f"{worst:.0e} nats{more}"
    said = f"{worst:.0e} nats{more}; {_ONE_BIT.format(*subject.rounding)}"
    return "yes" if worst < subject.allowed[0] else "no", said


def _adapters(subject: Subject, world: World) -> Found:
    """An adapted policy has the log-probabilities of its export, in which the adapters are merged."""
    meshes = build_meshes(world)
    policy = load_trained(settings_of(subject.path), _LORA, meshes, temperature=TEMPERATURE, seed=0)
    assert policy.adapters is not None
    policy.adapters.load(random_values(policy.adapters.trained, seed=0))
    merged = Path(subject.path).with_name("merged")
    export_hf(policy, _NoTokenizer(), merged, meshes, dtype=torch.float32)
    model = eager_model(str(merged))
    found = scores(subject.path, Layout(lora=_LORA), subject.batch, world).logprobs
    with torch.no_grad():
        worst = max(float((found[one.index] - eager_logprobs(model, one)).abs().max()) for one in subject.batch)
    shutil.rmtree(merged)
    return _close(worst, subject, " from the merged export")


class _NoTokenizer(PreTrainedTokenizerBase):
    def __init__(self) -> None:
        pass

    def save_pretrained(self, *_: Any, **__: Any) -> tuple[str, ...]:
        return ()


def _torch_engine(subject: Subject, _: World) -> Found:
    """The torch engine's log-probabilities of its own tokens, with its cache."""
    model = eager_model(subject.path)
    engine = TorchEngine(model.config, device=torch.device("cpu"), dtype=torch.float32, kernel="sdpa", max_running=3)
    load_whole(engine, weights_of(model), version=0)
    return _close(_worst(_sampled(engine, model.config, subject.batch), model), subject)


def _sglang(subject: Subject, world: World) -> Found:
    """SGLang's log-probabilities of its own tokens, after a refit of all weights."""
    batch, device_type = subject.batch, world.device.type
    config, meshes = load_model_config(ModelConfig(path=subject.path)), build_meshes(world)
    cfg = Config.model_validate(
        {
            "run": {"name": "model", "num_steps": 1},
            "model": {"path": subject.path, "compute_dtype": subject.dtype},
            "data": {"max_prompt_tokens": _PROMPT_TOKENS, "sources": [{"kind": "jsonl", "path": "data.jsonl"}]},
            "rollout": {
                **{"engine": "sglang", "prompts_per_step": len(batch), "group_size": 2, "temperature": TEMPERATURE},
                **{"max_response_tokens": _RESPONSE_TOKENS, "max_running": 2 * len(batch)},
                **_of_device(config, device_type),
            },
            "reward": {"terms": [{"kind": "exact"}]},
            "optim": {"lr": 1e-6},
            "pack": {"sequences_per_micro_batch": 1},
            "offload": {"engine": ["kv_cache", "weights"]},
        }
    )
    if problems := list(SGLangEngine.problems(cfg, config, _ends(config), num_ranks=1, device_type=device_type)):
        raise UserError("; ".join(problems))
    save_processor(config, Path(subject.path))
    options = sglang_options(cfg, make_plan(cfg, num_ranks=1), world, config)
    policy = load_trained(cfg.model, None, meshes, temperature=TEMPERATURE, seed=0)
    transport = wanted_transport("auto", device_type)
    try:
        engine = SGLangEngine(options, meshes.engine, model_config=config, transport=transport)
    except EngineDied as error:
        raise UserError(str(error)) from error
    try:
        differing = ""
        try:
            make_refit(policy, engine, meshes, cfg, dtype=getattr(torch, subject.dtype))(version=0)
        except RefitMismatch as error:  # by name or by value; what it computes with what it holds is asked all the same
            differing = str(error)
        engine.wake()
        window = min(sglang_window(config) or _MOST_TOKENS, _MOST_TOKENS)
        answer, said = _as_precise(_sampled(engine, config, batch, most_tokens=window), subject)
        if window < _MOST_TOKENS:
            said += f" up to {window} tokens, its window: runs with longer sequences are refused"
        return ("no", f"{said}, but {differing}") if differing else (answer, said)
    except RuntimeError as error:  # it died, or gave a request up
        return "no", " ".join(f"{differing} {error}".split())
    finally:
        engine.close()


def _of_device(config: Any, device_type: str) -> dict[str, Any]:
    """Return settings with which several engines fit on a device, and that need no kernels but Triton's there."""
    arguments: dict[str, Any] = {"max_mamba_cache_size": 64} if recurrent_layers(config.get_text_config()) else {}
    if device_type == "cpu":  # which lacks the default schedule and cache strategy of hybrids
        hybrid = {"disable_overlap_schedule": True, "mamba_radix_cache_strategy": "no_buffer"}
        return {"sglang": arguments | hybrid} if arguments else {}
    arguments |= {"sampling_backend": "pytorch", "grammar_backend": "none"}
    if vision_family(config) is not None:
        arguments["mm_attention_backend"] = "triton_attn"
    if find_spec("flashinfer") is None:  # which models with some layers would tune all the same
        arguments["disable_flashinfer_autotune"] = True
    memory = {"memory_fraction": 0.5, "max_kv_tokens": 2048}
    return {"attention_backend": attention_without_packages(config), "cuda_graphs": False, "sglang": arguments} | memory


def _as_precise(sampled: Sequence[Tokens], subject: Subject) -> Found:
    """Judge SGLang's log-probabilities, in bfloat16 by what that dtype changes in transformers."""
    model = eager_model(subject.path)
    if subject.dtype == "float32":
        return _close(_worst(sampled, model), subject)
    narrow = eager_model(subject.path).to(getattr(torch, subject.dtype))
    model.load_state_dict(narrow.state_dict())  # numbers that both dtypes have
    worst = _worst(sampled, model)
    with torch.no_grad():
        unit = max(float((eager_logprobs(narrow, one) - eager_logprobs(model, one)).abs().max()) for one in sampled)
    said = f"{worst:.0e} nats in {subject.dtype}, which changes transformers' own by {unit:.0e}"
    return "yes" if worst < TIMES_ONE_BIT * unit else "no", said


def _ends(config: Any) -> frozenset[int]:
    """Return the tokens that end a response of a tiny model."""
    ends = getattr(config.get_text_config(), "eos_token_id", None)
    return frozenset(ends if isinstance(ends, list) else [] if ends is None else [ends])


def _sampled(
    engine: RolloutEngine, config: Any, batch: Sequence[Tokens], *, most_tokens: int = _MOST_TOKENS
) -> list[Tokens]:
    """Sample after the beginnings of these sequences, at most `most_tokens` with the response."""
    room = min(most_tokens, changes_after(config) or most_tokens)
    response = min(_RESPONSE_TOKENS, room // 2)
    longest = room - response
    prompts = [sequence.token_ids[:longest] for sequence in batch]
    settings: dict[str, Any] = {"max_response_tokens": response, "stop_token_ids": _ends(config)}
    asked = [
        Request(prompt_ids=ids, seed=seed, temperature=TEMPERATURE, **settings) for seed, ids in enumerate(prompts)
    ]
    return [
        Tokens(
            index=index,
            token_ids=prompts[index] + response.token_ids,
            loss_mask=(False,) * len(prompts[index]) + (True,) * len(response.token_ids),
            rollout_logprobs=(0.0,) * len(prompts[index]) + response.logprobs,
            reward=0.0,
        )
        for index, response in engine.generate(asked)
    ]


@torch.no_grad()
def _worst(sampled: Sequence[Tokens], model: Any) -> float:
    """Compare the log-probabilities with which tokens were sampled with transformers' of the same tokens."""
    return max(float((eager_logprobs(model, x) - torch.tensor(x.rollout_logprobs)).abs().max()) for x in sampled)


def _export(subject: Subject, world: World) -> Found:
    """The files of an export have the names and the bits of those that were loaded, and transformers reads them."""
    meshes = build_meshes(world)
    policy = load_policy(settings_of(subject.path), meshes.model, temperature=TEMPERATURE)
    folder = Path(subject.path).with_name("exported")
    export_hf(policy, _NoTokenizer(), folder, meshes, dtype=torch.float32)
    wanted, found = (
        {name: x for file in Path(one).glob("*.safetensors") for name, x in load_file(file).items()}
        for one in (subject.path, folder)
    )
    loaded, fresh = eager_model(str(folder)).state_dict(), eager_model(subject.path).state_dict()
    shutil.rmtree(folder)
    if other := wanted.keys() ^ found.keys():
        return "no", f"names differ, among them {min(other)}"
    changed = [name for name, x in wanted.items() if not torch.equal(x, found[name])]
    changed += [name for name, x in fresh.items() if not torch.equal(x, loaded[name])]
    return ("no", f"{changed[0]} differs") if changed else ("yes", "bit for bit")


SGLANG = "SGLang"
RowFunction = Callable[[Subject, World], Found]
ROWS: Mapping[str, RowFunction] = {
    "weights as published": _weights,
    "packed": partial(_one_rank, Layout()),
    "one at a time": partial(_one_rank, Layout(pack=PackConfig(sequences_per_micro_batch=1))),
    **{name: partial(_two_ranks, name) for name in _TWO_RANKS},
    "adapters": _adapters,
    "torch engine": _torch_engine,
    SGLANG: _sglang,
    "export and reload": _export,
}
WITHOUT_SGLANG = tuple(question for question in ROWS if question != SGLANG)
ON_ONE_RANK = tuple(question for question in WITHOUT_SGLANG if question not in _TWO_RANKS)  # they take a moment


def verdicts(subject: Subject, questions: Collection[str]) -> Iterator[Verdict]:
    """Answer those of the questions that apply, in the order of `ROWS`, about a model that is not refused."""
    with spmd_session(threads_per_rank=torch.get_num_threads(), deterministic=True) as world:
        for question in ROWS:
            if question not in questions or (question == "ep 2" and not _has_experts(subject.source.config)):
                continue
            try:
                yield Verdict(question, *ROWS[question](subject, world))
            except UserError as error:
                yield Verdict(question, "refused", " ".join(str(error).split()))


# Work on two ranks of this machine, which start from one process that has imported everything.


_CONTEXT = multiprocessing.get_context("forkserver")
_PATIENCE_S = 240.0


def prepare(module: str) -> None:
    """Let the process that ranks are forked from import a module, in the background."""
    _CONTEXT.set_forkserver_preload([module])
    with ignored_interrupts():  # its forks ignore them, too
        forkserver.ensure_running()


def on_two_ranks(function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call function(*arguments) on two gloo ranks; returns their results in the order of ranks.

    What one of them raises is raised here, TimeoutError when one says nothing for minutes.
    """
    meeting = {"WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    calls = [(meeting | {"RANK": rank, "LOCAL_RANK": rank}, function, arguments) for rank in range(RANKS)]
    with _CONTEXT.Pool(RANKS) as pool:  # its end kills the ranks: one that used FSDP2 may abort when it exits by itself
        return [pickle.loads(found) for found in pool.starmap_async(_rank, calls, chunksize=1).get(_PATIENCE_S)]


def _rank(place: dict[str, Any], function: Callable[..., Any], arguments: tuple[Any, ...]) -> bytes:
    """Return by value what the function does: a tensor sent otherwise is a handle into a process that ends."""
    variables = place | {"OMP_NUM_THREADS": 1, "CUDA_VISIBLE_DEVICES": ""}
    os.environ.update({name: str(value) for name, value in variables.items()})
    return pickle.dumps(function(*arguments))
