"""A model that is sharded over one rank computes what the model alone does, and no more."""

from __future__ import annotations

import torch

from spmdrl.dist.mesh import build_meshes
from spmdrl.dist.session import spmd_session
from spmdrl.model.sharding import shard_policy
from tests.helpers.live import Watch
from tests.helpers.policies import policy_of, tokens

TINY = {"hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


def test_one_rank_divides_no_gradient() -> None:
    """A division, even by 1, would be one more float32 copy of a layer's gradients."""
    found = []
    with spmd_session(threads_per_rank=1, deterministic=True) as world:
        meshes = build_meshes(world)
        for is_sharded in (False, True):
            policy = policy_of("none", **TINY)
            if is_sharded:
                shard_policy(policy, meshes.model, dtype=torch.float32, offload=None, reshard_root=False)
            scores = policy(tokens(40, 30))
            with Watch() as watch:
                scores.logprobs.sum().backward()
            gradients = [parameter.grad for parameter in policy.parameters()]
            found.append(
                (watch.operations["aten::div"], [grad.to_local() if is_sharded else grad for grad in gradients])
            )
            del policy, scores
    (divisions, expected), (with_shards, gradients) = found
    assert with_shards == divisions
    assert all(torch.equal(one, other) for one, other in zip(gradients, expected, strict=True))
