"""A model that is sharded over one rank computes what the model alone does, and no more."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from spmdrl.dist.mesh import build_meshes
from spmdrl.dist.session import spmd_session
from spmdrl.model.sharding import decoder_layers, shard_policy
from tests.helpers.live import Watch
from tests.helpers.policies import policy_of, tokens

TINY = {"hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


def test_one_rank_divides_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A division, even by 1, would be one more float32 copy of a layer's gradients."""
    found = []
    with spmd_session(threads_per_rank=1, deterministic=True) as world:
        meshes = build_meshes(world)
        for one_unit_bytes in (None, 64 * 2**20, 0):
            policy = policy_of("none", **TINY)
            if one_unit_bytes is not None:
                monkeypatch.setattr("spmdrl.model.sharding._ONE_UNIT_BYTES", one_unit_bytes)
                shard_policy(policy, meshes.model, dtype=torch.float32, offload=None, reshard_root=False)
            scores = policy(tokens(40, 30))
            with Watch() as watch:
                scores.logprobs.sum().backward()
            gradients = [parameter.grad for parameter in policy.parameters()]
            found.append(
                (watch.operations["aten::div"], [x.to_local() if isinstance(x, DTensor) else x for x in gradients])
            )
            del policy, scores
    (divisions, expected), *sharded = found
    for with_shards, gradients in sharded:
        assert with_shards == divisions
        assert all(torch.equal(one, other) for one, other in zip(gradients, expected, strict=True))


@pytest.mark.parametrize(
    ("dtype", "num_bytes", "is_one_unit"),
    [
        (torch.float32, 64 * 2**20, True),
        (torch.float32, 1000, False),
        (torch.bfloat16, 64 * 2**20, False),  # its layers are cast, one after the other
    ],
)
def test_layers_are_units_where_something_is_gathered_cast_or_large(
    dtype: torch.dtype, num_bytes: int, is_one_unit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spmdrl.model.sharding._ONE_UNIT_BYTES", num_bytes)
    with spmd_session(threads_per_rank=1, deterministic=True) as world:
        policy = policy_of("none", **TINY)
        shard_policy(policy, build_meshes(world).model, dtype=dtype, offload=None, reshard_root=False)
        units = [module for module in policy.modules() if isinstance(module, FSDPModule)]
    assert (units == [policy]) == is_one_unit
    assert is_one_unit or len(units) == 1 + len(decoder_layers(policy.model))
