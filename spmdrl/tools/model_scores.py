"""The scores that `spmdrl model` compares: log-probabilities and gradients of one loss, by eager code and by ours."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

from spmdrl.config import LoraConfig, ModelConfig, OptimConfig, PackConfig, ParallelConfig
from spmdrl.dist.mesh import build_meshes
from spmdrl.dist.session import World
from spmdrl.learn.learner import Learner
from spmdrl.learn.objective import SftObjective
from spmdrl.learn.update import update
from spmdrl.model.load import load_model_config, parallel_model_problems
from spmdrl.model.lora.policy import load_trained, random_values
from spmdrl.model.policy import Policy
from spmdrl.model.sharding import decoder_layers, reshard
from spmdrl.model.trunk import model_class
from spmdrl.step.batch import build_batch, lay_end_to_end
from spmdrl.tools.model_shrink import VOCABULARY
from spmdrl.tools.parity_cases import GradientAsWeight, differences, move_to_neighbours, plan_of, whole_weights
from spmdrl.types import Sequence as Tokens
from spmdrl.types import UserError

TEMPERATURE = 0.8
_LENGTHS = (90, 3, 41, 2, 17, 67)


@dataclass(frozen=True, slots=True)
class Layout:
    """A way to split the work: packed or alone, on one rank or two."""

    num_ranks: int = 1
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    pack: PackConfig = field(default_factory=lambda: PackConfig(max_tokens_per_micro_batch=512))
    lora: LoraConfig | None = None


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores of one loss, the mean of minus the log-probabilities of all responses."""

    logprobs: dict[int, Tensor]  # [T] of each sequence, 0 outside its response
    gradients: dict[str, Tensor]  # of each parameter, by its name in the model


def sequences(longest: int | None = None) -> list[Tokens]:
    """Make random sequences, one of them longer than any window; `longest` cuts them."""
    rng, made = random.Random(0), []
    for index, wanted in enumerate(_LENGTHS):
        length = min(wanted, longest or wanted)
        prompt = max(1, length // 4)
        made.append(
            Tokens(
                index=index,
                token_ids=tuple(rng.randrange(3, VOCABULARY - 8) for _ in range(length)),
                loss_mask=(False,) * prompt + (True,) * (length - prompt),
                rollout_logprobs=(0.0,) * length,
                reward=1.0,
            )
        )
    return made


def eager_model(path: str) -> Any:
    """Load the model as transformers computes it by itself."""
    cfg = ModelConfig(path=path)
    config = load_model_config(cfg)
    return model_class(config).from_pretrained(path, attn_implementation="eager", dtype=torch.float32).eval()


def eager_logprobs(model: Any, sequence: Tokens) -> Tensor:
    """Compute [T] by transformers, a sequence at a time; 0 outside its response."""
    ids = torch.tensor(sequence.token_ids)
    log_p = (model(input_ids=ids[None], use_cache=False).logits[0].float() / TEMPERATURE).log_softmax(-1)
    of_tokens = pad(log_p[:-1].gather(1, ids[1:, None])[:, 0], (1, 0))
    return torch.where(torch.tensor(sequence.loss_mask), of_tokens, 0.0)


def eager_scores(path: str, batch: Sequence[Tokens], *, moved: bool = False) -> Scores:
    """Compute the scores by transformers' eager code, with weights `moved` to one of their neighbours."""
    model, logprobs = eager_model(path), dict[int, Tensor]()
    if moved:
        move_to_neighbours(model.parameters())
    count = sum(sum(sequence.loss_mask) for sequence in batch)
    for sequence in batch:
        found = eager_logprobs(model, sequence)
        (-found.sum() / count).backward()
        logprobs[sequence.index] = found.detach()
    return Scores(logprobs, {name: p.grad for name, p in model.named_parameters() if p.grad is not None})


def settings_of(path: str) -> ModelConfig:
    """Return the settings that a run would have for the tiny model."""
    return ModelConfig(path=path, compute_dtype="float32", logits_chunk_tokens=64)


def scores(path: str, layout: Layout, batch: Sequence[Tokens], world: World) -> Scores:
    """Compute this rank's part of the scores as a run would; every rank must call this.

    Gradients are whole on the first rank. Raises UserError when the model does not support the layout.
    """
    cfg = settings_of(path)
    config = load_model_config(cfg)
    if problems := list(parallel_model_problems(config, cfg, layout.parallel)):
        raise UserError("; ".join(problems))
    meshes = build_meshes(world, layout.parallel)
    policy = load_trained(cfg, layout.lora, meshes, temperature=TEMPERATURE, seed=0)
    if policy.adapters is not None:  # they begin at 0
        policy.adapters.load(random_values(policy.adapters.trained, seed=0))
    plan = plan_of(list(batch), layout.pack, meshes, num_updates=1)
    built = build_batch(list(batch[world.rank :: world.num_ranks]), plan, meshes, aggregation="token_mean")
    logprobs: dict[int, Tensor] = {}
    with torch.no_grad():
        for micro_batch in built.micro_batches:
            parts = policy(micro_batch).logprobs.cpu().split(micro_batch.seqlens)
            logprobs |= dict(zip(micro_batch.sequence_index, parts, strict=True))
    reshard(policy)
    optim = OptimConfig(name=f"{GradientAsWeight.__module__}:GradientAsWeight", lr=1.0, max_grad_norm=1e30)
    learner = Learner(policy, optim, SftObjective(), num_updates=1, dtype=torch.float32)
    update(learner, built.mini_batches, meshes, step=1)
    return Scores(logprobs, whole_weights(policy, meshes))


def difference(found: Scores, expected: Scores) -> tuple[float, float, str]:
    """Return (of log-probabilities, of gradients, the parameter of the latter), the worst of each."""
    apart = max(float((found.logprobs[index] - x).abs().max()) for index, x in expected.logprobs.items())
    worst, name = max((size, name) for name, size in differences(found.gradients, expected.gradients).items())
    return apart, worst, name


# Where two computations part: the first part of a layer, and the first token, whose values differ.


def first_difference(path: str, policy: Policy, batch: Sequence[Tokens], *, bound: float) -> tuple[str, int, int]:
    """Return (part of the model, place of the sequence in the pack, token in it) where packed and eager part.

    The part is "embedding", "layer 3", one in it such as "layer 3: self_attn", or "head".
    """
    model = eager_model(path)
    with torch.no_grad():
        expected: dict[str, Tensor] = {}
        for sequence in batch:
            with _outputs(model, len(sequence.token_ids)) as seen:
                model(input_ids=torch.tensor(sequence.token_ids)[None], use_cache=False)
            expected = {name: torch.cat([expected[name], x]) for name, x in seen.items()} if expected else dict(seen)
        packed = lay_end_to_end(list(batch), {})
        with _outputs(policy.model, len(packed.token_ids)) as found:
            logprobs = policy(packed).logprobs.cpu()
        ours = dict(found) | {"head": logprobs[:, None]}
        expected["head"] = torch.cat([eager_logprobs(model, sequence) for sequence in batch])[:, None]
    for name, x in expected.items():
        if name not in ours or ours[name].shape != x.shape:
            continue  # computed together with another
        apart = (ours[name] - x).abs().amax(-1) > bound * max(1.0, float(x.abs().max()))
        if apart.any():
            token, place = int(apart.nonzero()[0]), 0
            while token >= len(batch[place].token_ids):
                token, place = token - len(batch[place].token_ids), place + 1
            return name, place, token
    return "gradients", 0, 0


@contextmanager
def _outputs(model: PreTrainedModel, num_tokens: int) -> Iterator[dict[str, Tensor]]:
    """Collect what parts of a model give for each token, [T, D], in the order in which they are computed."""
    seen: dict[str, Tensor] = {}

    def collect(name: str) -> Any:
        def hook(_module: nn.Module, _arguments: Any, output: Any) -> None:
            value = output[0] if isinstance(output, tuple) else output
            if isinstance(value, Tensor) and value.numel() % num_tokens == 0 and value.is_floating_point():
                seen[name] = value.detach().float().cpu().reshape(num_tokens, -1)

        return hook

    modules: dict[str, nn.Module] = {"embedding": model.get_input_embeddings()}
    for number, layer in enumerate(decoder_layers(model)):
        modules |= {f"layer {number}: {name}": child for name, child in layer.named_children()}
        modules[f"layer {number}"] = layer
    handles = [module.register_forward_hook(collect(name)) for name, module in modules.items()]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
