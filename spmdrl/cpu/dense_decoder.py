"""Decoding of dense models in float32 on a CPU, without transformers' modules.

For one token a row, a module's Python and small operations take as long as its products. Here a layer is four products:
q, k and v are one, and gate and up are one, because their weights are views of one tensor. So a refit writes them where
they are read. Models of other families, dtypes and devices decode by their own forward pass. What is decoded is text,
whose positions of frame, row and column are equal: the language half of a model with images is like any other.
What an environment says is read in the same way, several new tokens to a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation

from spmdrl.cpu import kernels_c
from spmdrl.cpu.kernels_c import serves
from spmdrl.cpu.linear_layers import linear
from spmdrl.engine.torch.adapters import AdapterBank
from spmdrl.engine.torch.cache import DecodeTokens, PrefillExtend
from spmdrl.families import FAMILIES, layer_class
from spmdrl.model.attention_layer import AttentionLayer
from spmdrl.model.fused import kernels_for
from spmdrl.model.rotary import changes_after
from spmdrl.model.trunk import Trunk

# Layers of transformers, by name: a run has one of them, and importing all takes longer than all else here.
LAYERS = [layer_class(name, "DecoderLayer") for name, family in FAMILIES.items() if family.has_dense_decoder]


def can_decode(model: PreTrainedModel) -> bool:
    """True when `DenseDecoder` computes what the model's own forward pass computes."""
    config, decoder = model.config.get_text_config(), _decoder(model)
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type")
    return (
        model.device.type == "cpu"
        and model.dtype == torch.float32
        and rope is not None
        and changes_after(config) is None
        and all(f"{type(layer).__module__}.{type(layer).__qualname__}" in LAYERS for layer in decoder.layers)
    )


@dataclass(frozen=True, slots=True)
class _Product:
    """One linear layer, or several of the same input, with the adapters of each row."""

    weight: Tensor  # [V, D]
    bias: Tensor | None  # [V]
    layers: tuple[str, ...]  # their names
    adapters: AdapterBank

    def __call__(self, x: Tensor) -> Tensor:
        return self.adapters.add_to(linear(x, self.weight, self.bias), x, self.layers)


@dataclass(frozen=True, slots=True)
class _Layer:
    """The weights of a decoder layer."""

    attention: AttentionLayer
    norm_in: Tensor  # [D]
    qkv: _Product
    qk_norms: tuple[Tensor | None, Tensor | None]  # [D] each; None where heads are not normed
    out: _Product
    norm_between: Tensor  # [D]
    gate_up: _Product
    gated: Callable[[Tensor, Tensor], Tensor]
    down: _Product


class DenseDecoder:
    """Computes the logits of each row's next token, with the weights of a model."""

    def __init__(self, model: PreTrainedModel, adapters: AdapterBank) -> None:
        """Move the weights of layers with the same input next to each other; the model's parameters become views."""
        assert can_decode(model), f"{type(model).__name__} decodes by its own forward pass"
        config: Any = model.config.get_text_config()
        family = Trunk(model).family
        self._has_grid_positions = family is not None and family.has_grid_positions
        self._model, self._decoder = model, _decoder(model)
        self._num_heads = config.num_attention_heads
        self._head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._eps = config.rms_norm_eps
        names = {module: name for name, module in model.named_modules()}
        product = partial(_side_by_side, names=names, adapters=adapters)
        self._layers = [_layer(layer, product) for layer in self._decoder.layers]
        self._rotary = torch.empty(2, 0, self._head_dim)

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        longest: int,
        new: DecodeTokens | PrefillExtend,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """New tokens [n] at positions [n], below `longest`, give logits [n, V]; or [m, V] of the `wanted` ones [m]."""
        if self._rotary.shape[1] < longest:
            self._rotary = self._rotary_until(2 * longest)
        cos, sin = self._rotary[:, positions]
        hidden = F.embedding(tokens, self._model.get_input_embeddings().weight)
        kernels = kernels_for(hidden)
        for layer in self._layers:
            x, _ = kernels.rms_norm(hidden, layer.norm_in, self._eps)
            heads = layer.qkv(x).unflatten(-1, (-1, self._head_dim))
            hidden = hidden + layer.out(self._attended(heads, layer, cos, sin, new).flatten(1))
            x, _ = kernels.rms_norm(hidden, layer.norm_between, self._eps)
            hidden = hidden + layer.down(layer.gated(*layer.gate_up(x).chunk(2, dim=-1)))
        hidden = hidden if wanted is None else hidden[wanted]
        head = self._model.get_output_embeddings()
        return linear(kernels.rms_norm(hidden, self._decoder.norm.weight, self._eps)[0], head.weight, head.bias)

    def _attended(
        self, qkv: Tensor, layer: _Layer, cos: Tensor, sin: Tensor, new: DecodeTokens | PrefillExtend
    ) -> Tensor:
        """Rotate and attend: qkv [n, H + 2 K, D], cos and sin [n, D] give [n, H, D]."""
        num_kv_heads = (qkv.shape[1] - self._num_heads) // 2
        if isinstance(new, DecodeTokens) and serves(qkv, *layer.qk_norms, cos, sin):
            size, seen = (num_kv_heads, self._head_dim), new.seen.through(layer.attention.window)
            cache = new.cells(layer.attention.index, size)
            tables = (layer.qk_norms, cos, sin, self._eps)
            return kernels_c.attend_newest(qkv, *tables, *cache, seen, layer.attention.scale)
        q, k, v = qkv.split((self._num_heads, num_kv_heads, num_kv_heads), dim=1)
        q, k = (
            kernels_for(x).rotate(x, norm, cos, sin, self._eps) for x, norm in zip((q, k), layer.qk_norms, strict=True)
        )
        query, key, value = (part.transpose(0, 1)[None] for part in (q, k, v))
        return new(query, key, value, layer.attention)[0]

    def _rotary_until(self, size: int) -> Tensor:
        """Cosines and sines of positions [0, size), [2, size, D]."""
        like, positions = self._rotary.new_empty(0), torch.arange(size)[None]
        if self._has_grid_positions:  # what is decoded is text, whose positions of all three kinds are the same
            positions = positions.expand(3, 1, -1)
        tables = self._decoder.rotary_emb(like, positions)
        return torch.stack([table.view(-1, size, self._head_dim)[0] for table in tables])


def _decoder(model: PreTrainedModel) -> Any:
    return Trunk(model).decoder


def _layer(layer: Any, product: Callable[[Sequence[nn.Linear]], _Product]) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    return _Layer(
        attention=AttentionLayer(
            index=attention.layer_idx, scale=attention.scaling, window=getattr(attention, "sliding_window", None)
        ),
        norm_in=layer.input_layernorm.weight,
        qkv=product([attention.q_proj, attention.k_proj, attention.v_proj]),
        qk_norms=(attention.q_norm.weight, attention.k_norm.weight) if hasattr(attention, "q_norm") else (None, None),
        out=product([attention.o_proj]),
        norm_between=layer.post_attention_layernorm.weight,
        gate_up=product([mlp.gate_proj, mlp.up_proj]),
        gated=_swiglu if type(mlp.act_fn) in (nn.SiLU, SiLUActivation) else partial(_gated_by, mlp.act_fn),
        down=product([mlp.down_proj]),
    )


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    gated: Tensor = kernels_for(gate).swiglu(gate, up)
    return gated


def _gated_by(activation: nn.Module, gate: Tensor, up: Tensor) -> Tensor:
    gated: Tensor = activation(gate)
    return gated.mul_(up)


def _side_by_side(linears: Sequence[nn.Linear], *, names: Mapping[nn.Module, str], adapters: AdapterBank) -> _Product:
    """Make the weights of linear layers views of one tensor."""
    biases = [layer.bias for layer in linears if layer.bias is not None]
    assert len(biases) in (0, len(linears)), "some of these layers have a bias and some have none"
    return _Product(
        _joined([layer.weight for layer in linears]),
        _joined(biases) if biases else None,
        tuple(names[layer] for layer in linears),
        adapters,
    )


def _joined(parameters: Sequence[Tensor]) -> Tensor:
    """Make parameters views of one tensor, along their first dimension, and return it."""
    if len(parameters) == 1:
        return parameters[0]
    whole = torch.cat([parameter.data for parameter in parameters])
    for parameter, part in zip(parameters, whole.split([len(parameter) for parameter in parameters]), strict=True):
        parameter.data = part
    return whole
