"""Attention under context parallelism by the ring_flash_attn package, where it is installed."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable
from itertools import accumulate
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from spmdrl.dist.mesh import ModelMeshes
from spmdrl.model.attention_layer import Attend, AttentionLayer
from spmdrl.model.kernels import refuse_sinks, window_size
from spmdrl.types import UserError


def has_ring_attention() -> bool:
    """Return True when ring_flash_attn is installed."""
    return importlib.util.find_spec("ring_flash_attn") is not None


def is_for_ring_attention(model: nn.Module, meshes: ModelMeshes) -> bool:
    """Return True when ring_flash_attn can be used: cp_style = "all_gather", both packages, and no attention sinks."""
    has_kernels = has_ring_attention() and importlib.util.find_spec("flash_attn") is not None
    has_sinks = any(hasattr(module, "sinks") for module in model.modules())
    return meshes.cp.size() > 1 and meshes.cp_style == "all_gather" and has_kernels and not has_sinks


def ring_attention(
    cu_seqlens: Tensor, seqlens: list[int], mesh: DeviceMesh, *, heads_per_group: Callable[[Tensor], int]
) -> Attend:
    """All-gather attention by ring_flash_attn, whose backward pass does not attend again.

    `heads_per_group` returns how many heads of a key [1, K, n, D] are gathered at a time.
    """
    ring = _load_ring()
    # On the host, so that reading its lengths does not wait for the device.
    on_host = torch.tensor([*accumulate(seqlens, initial=0)], dtype=torch.int32)
    cu_queries, cu_keys, max_queries, max_keys, key_slice = ring.llama3_flash_attn_prepare_cu_seqlens(
        on_host, causal=True, rank=mesh.get_local_rank(), world_size=mesh.size()
    )
    cu_queries, cu_keys = cu_queries.to(cu_seqlens.device), cu_keys.to(cu_seqlens.device)

    def attend(query: Tensor, key: Tensor, value: Tensor, layer: AttentionLayer) -> Tensor:
        refuse_sinks("flash_attn_2", layer)
        out: Tensor = ring.llama3_flash_attn_varlen_func(
            *(x[0].transpose(0, 1) for x in (query, key, value)),
            cu_queries,
            cu_keys,
            max_queries,
            max_keys,
            heads_k_stride=heads_per_group(key),
            local_k_slice=key_slice,
            softmax_scale=layer.scale,
            causal=True,
            window_size=window_size(layer),
            deterministic=torch.are_deterministic_algorithms_enabled(),
            group=mesh.get_group(),
        )
        return out.unsqueeze(0)

    return attend


@functools.cache
def _load_ring() -> ModuleType:
    """Import the one module of ring_flash_attn that is used, without running the package's `__init__`.

    The `__init__` of ring_flash_attn 0.1.8 imports a name that transformers 5 has moved, for an adapter not used here.
    """
    found = importlib.util.find_spec("ring_flash_attn")
    assert found is not None and found.submodule_search_locations is not None
    package = ModuleType("spmdrl_ring_flash_attn")
    package.__path__ = found.submodule_search_locations
    sys.modules[package.__name__] = package
    try:
        return importlib.import_module(f"{package.__name__}.llama3_flash_attn_varlen")
    except ImportError as error:
        raise UserError(f'model.attention = "flash_attn_2" cannot use ring_flash_attn ({error})') from error
