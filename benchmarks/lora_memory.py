"""Count what a trainer holds at its first update: of a whole model, and of adapters on the same model.

    python benchmarks/lora_memory.py
    python benchmarks/lora_memory.py --base nf4     # the adapters' base in 4 bits

A random model of 1 billion parameters in bfloat16 on one CPU rank, AdamW, one short sequence. The bytes of weights,
gradients and optimizer state are those of the tensors themselves, counted after the optimizer's step and before the
gradients are gone, so they do not depend on the machine. Training the whole model takes 16 GiB. Prints one JSON object,
with what the planner says of both.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import get_args

import torch
import workload
from load_memory import write_checkpoint
from program import run_again
from torch import Tensor
from torch.distributed.tensor import DTensor

from spmdrl.config import LoraConfig, ModelConfig, OptimConfig, PackConfig, ParallelConfig
from spmdrl.config.model import QuantizedBase
from spmdrl.dist.mesh import build_meshes
from spmdrl.dist.session import spmd_session
from spmdrl.learn.learner import Learner
from spmdrl.learn.objective import SftObjective
from spmdrl.learn.update import update
from spmdrl.memory.device import training_memory
from spmdrl.model.load import load_model_config
from spmdrl.model.lora.policy import load_trained
from spmdrl.model.lora.quantized import QuantizedLinear
from spmdrl.preflight.forecast import Model
from spmdrl.step.batch import build_batch
from spmdrl.tools.parity_cases import plan_of, random_batch

DTYPE = torch.bfloat16
WAYS = ("adapters", "whole")
OPTIM = OptimConfig(lr=1e-5)


def main() -> None:
    """Write the model, train it in both ways, print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rank", type=int, default=16, help="of the adapters")
    parser.add_argument("--base", choices=get_args(QuantizedBase), help="bits of the adapters' base")
    parser.add_argument("--layers", type=int, default=14, help="14 make 1.0 billion parameters")
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument(
        "--ways", nargs="+", choices=WAYS, default=WAYS, help="the whole model takes 16 bytes a parameter"
    )
    parser.add_argument("--trains", choices=WAYS, help=argparse.SUPPRESS)  # set by this program
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.trains:
        lora = LoraConfig(rank=args.rank, base=args.base) if args.trains == "adapters" else None
        print(json.dumps(measure(args.model, lora)))
        return
    with tempfile.TemporaryDirectory() as folder:
        written = write_checkpoint(Path(folder), dtype=DTYPE, num_layers=args.layers, vocabulary=args.vocabulary)
        found = {way: run_again("--trains", way, "--model", folder) for way in args.ways}
    parameters = int(written["num_parameters"])
    print(
        json.dumps(
            {
                "num_parameters": parameters,
                "rank": args.rank,
                "base": args.base,
                **found,
                "versions": workload.versions(["spmdrl", "torch", "transformers"]),
            }
        )
    )


def measure(path: Path, lora: LoraConfig | None) -> dict[str, dict[str, int]]:
    """Take one optimizer step and count the bytes that are held then, beside those that are predicted."""
    cfg = ModelConfig(path=str(path), compute_dtype="bfloat16")
    config = load_model_config(cfg)
    with spmd_session(threads_per_rank=0, deterministic=False) as world:
        meshes = build_meshes(world)
        policy = load_trained(cfg, lora, meshes, temperature=1.0, seed=0)
        learner = Learner(policy, OPTIM, SftObjective(), num_updates=1, dtype=DTYPE)
        gradients: list[int] = []
        learner.optimizer.register_step_post_hook(
            lambda *_: gradients.append(_bytes(p.grad for p in policy.parameters() if p.grad is not None))
        )
        sequences = random_batch(vocabulary=config.vocab_size, num_sequences=1, max_tokens=32)
        plan = plan_of(sequences, PackConfig(sequences_per_micro_batch=1), meshes, num_updates=1)
        batch = build_batch(sequences, plan, meshes, aggregation="token_mean")
        update(learner, batch.mini_batches, meshes, step=1)
        state = [x for values in learner.optimizer.state.values() for x in values.values() if isinstance(x, Tensor)]
        layers = [layer for layer in policy.modules() if isinstance(layer, QuantizedLinear)]
        quantized = [x for numbers, state in (layer.stored for layer in layers) for x in (numbers, state.absmax)]
        weights = [*policy.parameters(), *quantized]
        held = {"weights": _bytes(weights), "gradients": gradients[0], "optimizer": _bytes(state)}
    size = Model.read(config, cfg, lora=lora).size(ParallelConfig(), num_training=1)
    planned = training_memory(cfg, OPTIM, [size], compute_bytes=DTYPE.itemsize)
    predicted = {"weights": planned.weights, "gradients": planned.gradients, "optimizer": planned.optimizer}
    return {"held_bytes": held, "predicted_bytes": predicted}


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Count the bytes of the memory behind these tensors, each memory once."""
    locals_ = (x.to_local() if isinstance(x, DTensor) else x for x in tensors)
    on_device = (x.detach().untyped_storage() for x in locals_ if not x.is_meta)  # a quantized layer's is elsewhere
    storages = {one.data_ptr(): one.nbytes() for one in on_device}
    return sum(storages.values())


if __name__ == "__main__":
    main()
