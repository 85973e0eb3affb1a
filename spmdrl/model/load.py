"""Loading a Hugging Face directory as a policy or critic whose parameters are sharded over the ranks of a mesh.

transformers builds the model on the meta device, we shard it, and transformers then reads into each rank only the
slices that the rank owns, with the renaming and fusing that the architecture needs. The same code serves one rank and
many, a CPU and CUDA, and models that live on a subset of the ranks.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from safetensors import SafetensorError
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoConfig, PreTrainedModel
from transformers.core_model_loading import ConversionOps, MergeModulelist, WeightConverter, WeightRenaming
from transformers.distributed import DistributedConfig

from spmdrl.config import ModelConfig, ParallelConfig
from spmdrl.config.model import FrozenModelConfig, QuantizedBase
from spmdrl.config.strict import read_json
from spmdrl.data.tokenizer import require_model
from spmdrl.dist.mesh import ModelMeshes
from spmdrl.dist.session import default_device_type, return_freed_memory
from spmdrl.families import without_sounds
from spmdrl.model.attention import choose_kernel, fastest_varlen
from spmdrl.model.context import ContextRanks, context_problems, is_for_ring_attention
from spmdrl.model.few_bits import quantization_of, quantization_refusal
from spmdrl.model.fused import check_compiler
from spmdrl.model.kernels import Kernel
from spmdrl.model.layer_kinds import cached_heads
from spmdrl.model.layers import replace_layers
from spmdrl.model.lora.quantized import QuantizedLinear, quantized_weights
from spmdrl.model.operators import operators_of
from spmdrl.model.param_groups import frozen_parameters
from spmdrl.model.policy import Critic, PackedModel, Policy
from spmdrl.model.recurrent import recurrent_context_problems
from spmdrl.model.sharding import checkpoint_layers, decoder_layers, prefetch_layers, shard_policy
from spmdrl.model.split import has_experts, split_problems
from spmdrl.model.supported import refusal_of_config, refusal_of_model
from spmdrl.model.trunk import attention_of, model_class
from spmdrl.model.weight_files import lacking, quiet_transformers, stored_weights
from spmdrl.types import UserError

ModelT = TypeVar("ModelT", bound=PackedModel)

Role = Literal["trained", "base", "reference", "resident"]
_MAX_FREED_BYTES = 2**25  # freed while weights are copied, before it is returned to the system
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def compute_dtype(setting: str, device_type: str) -> torch.dtype:
    """Choose the dtype of forward and backward that `model.compute_dtype` means on this kind of device."""
    if setting == "auto":
        return torch.bfloat16 if device_type == "cuda" else torch.float32
    return DTYPES[setting]


def load_model_config(cfg: ModelConfig) -> Any:
    """Read the model config of a directory that must hold weights. Raises UserError like `read_model_config`."""
    config = read_model_config(cfg)
    if not any(Path(cfg.path).glob("*.safetensors")):
        raise UserError(f'model.path = "{cfg.path}" holds no *.safetensors weights')
    return config


def read_model_config(cfg: ModelConfig) -> Any:
    """Read the directory's model config and check that the model can be trained here; needs no GPU and no weights.

    Raises UserError when the path holds no model, or a model that is not supported.
    """
    require_model(cfg.path)
    if not (Path(cfg.path) / "config.json").is_file():
        raise UserError(f'model.path = "{cfg.path}" is not a model directory: it has no config.json')
    try:
        read_json(Path(cfg.path) / "config.json", dict[str, Any])
        config = without_sounds(AutoConfig.from_pretrained(cfg.path, trust_remote_code=cfg.trust_remote_code))
        refusal = quantization_refusal(quantization_of(cfg.path))
        for part in (config, config.get_text_config()):
            vars(part).pop("quantization_config", None)  # weights of few bits are read as the numbers they encode
        refusal = (
            refusal or refusal_of_config(config) or refusal_of_model(model_without_memory(config, cfg), cfg.attention)
        )
    except Exception as error:  # transformers raises many types for a bad config.json
        reason = " ".join(str(error).split())
        raise UserError(f'model.path = "{cfg.path}" is not a causal language model: {reason}') from error
    if refusal:
        raise UserError(f'model.path = "{cfg.path}": {refusal}')
    return config


def parameter_shapes(model_config: Any, cfg: ModelConfig) -> tuple[dict[str, tuple[int, ...]], list[set[str]]]:
    """Return (shape of each parameter, tied ones once; names of each decoder layer's parameters), without memory."""
    return _shapes(model_without_memory(model_config, cfg))


def critic_shapes(model_config: Any, cfg: ModelConfig) -> tuple[dict[str, tuple[int, ...]], list[set[str]]]:
    """Return what `parameter_shapes` returns, for a critic and without its value head."""
    model = copy.deepcopy(model_without_memory(model_config, cfg))
    drop_head(model)
    return _shapes(model)


def _shapes(model: PreTrainedModel) -> tuple[dict[str, tuple[int, ...]], list[set[str]]]:
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return shapes, [{names[id(parameter)] for parameter in layer.parameters()} for layer in decoder_layers(model)]


def parallel_model_problems(
    model_config: Any, cfg: ModelConfig, parallel: ParallelConfig, *, needs_experts: bool = True
) -> Iterator[str]:
    """Yield a sentence for each setting of [parallel] that this model does not support; takes no memory.

    Without `needs_experts` its ep is nothing to a model without experts.
    """
    dtype = compute_dtype(cfg.compute_dtype, default_device_type())
    model = model_without_memory(model_config, cfg)
    ep = parallel.ep if needs_experts or has_experts(model) else 1
    yield from split_problems(model, tp=parallel.tp, ep=ep, element_bytes=dtype.itemsize)
    if parallel.cp > 1:
        text = model_config.get_text_config()
        yield from recurrent_context_problems(text, parallel.cp)
        heads = text.num_attention_heads
        for of_keys in sorted({number for number, _ in cached_heads(text).values()}):
            on_rank = [max(1, number // parallel.tp) for number in (heads, of_keys)]
            yield from context_problems(on_rank[0], on_rank[1], parallel.cp, parallel.cp_style)


def frozen_names(model_config: Any, cfg: ModelConfig) -> frozenset[str]:
    """Return the names of the parameters that are not trained, without memory."""
    return frozenset(frozen_parameters(model_without_memory(model_config, cfg), cfg.freeze))


def model_without_memory(model_config: Any, cfg: ModelConfig) -> PreTrainedModel:
    """Return the model on the meta device with tied weights, from transformers' code or the directory's own.

    All who ask about equal configs share it, so nobody may change it.
    """
    try:
        text = model_config.to_json_string(use_diff=False)
    except TypeError:  # a value that JSON has no form for, in a config of the directory's own code
        text = repr(model_config.to_dict())
    return _built(
        _Architecture(type(model_config), text, model_config.name_or_path, cfg.trust_remote_code, model_config)
    )


@dataclass(frozen=True, slots=True)
class _Architecture:
    """All that a model without memory depends on."""

    config_type: type
    config_text: str
    directory: str
    trust_remote_code: bool
    config: Any = field(compare=False)


@functools.lru_cache(maxsize=4)  # the policy and its teachers
def _built(architecture: _Architecture) -> PreTrainedModel:
    with torch.device("meta"):
        model: PreTrainedModel = model_class(architecture.config).from_config(
            copy.deepcopy(architecture.config), trust_remote_code=architecture.trust_remote_code
        )
    model.tie_weights()
    return model


def load_policy(
    cfg: ModelConfig,
    meshes: ModelMeshes,
    *,
    temperature: float,
    role: Role = "trained",
    quantized: QuantizedBase | None = None,
    kernel: Kernel | None = None,
) -> Policy:
    """Load the directory's model, sharded over `meshes`.

    One that is "trained" has float32 master weights. The "base" of adapters is frozen, and has weights in the compute
    dtype alone; those of its linear layers may be `quantized`, and are then whole on every rank. The "reference" is
    frozen too, and keeps its shards in host memory between forward passes; one that is "resident", on the device.
    `kernel` overrides `cfg.attention`. Raises UserError like `load_model_config`, and for weights that the architecture
    needs but the directory lacks.
    """

    def policy_of(model: PreTrainedModel, chosen: Kernel) -> Policy:
        return Policy(
            model,
            kernel=chosen,
            temperature=temperature,
            logits_chunk_tokens=cfg.logits_chunk_tokens,
            vocabulary=meshes.tp if meshes.tp.size() > 1 else None,
            context=ContextRanks.of(meshes),
        )

    return load_packed(cfg, meshes, policy_of, role=role, kernel=kernel, quantized=quantized)


def load_critic(cfg: ModelConfig, meshes: ModelMeshes) -> Critic:
    """Load the directory's model as a critic: sharded like a policy, its language head replaced by a value head of 0.

    Raises UserError like `load_policy`, about `critic.path`.
    """

    def critic_of(model: PreTrainedModel, chosen: Kernel) -> Critic:
        drop_head(model)
        device = torch.device(meshes.dense.device_type)
        return Critic(model, kernel=chosen, device=device, context=ContextRanks.of(meshes))

    with errors_about("critic"):
        return load_packed(cfg, meshes, critic_of, role="trained", kernel=None)


@contextmanager
def errors_about(table: str) -> Iterator[None]:
    """Let each UserError about a model name the setting `path` of its table."""
    try:
        yield
    except UserError as error:
        raise UserError(str(error).replace("model.path", f"{table}.path")) from error


def drop_head(model: PreTrainedModel) -> None:
    """Remove the language head of a model without weights, and ignore the head's weights in files."""
    head = model.get_output_embeddings()
    (name,) = (name for name, module in model.named_modules() if module is head)
    model.set_output_embeddings(None)
    model.config.tie_word_embeddings = False  # nothing is left to be tied
    model.all_tied_weights_keys = {}
    ignored = model._keys_to_ignore_on_load_unexpected or ()
    model._keys_to_ignore_on_load_unexpected = {*ignored, rf"^{re.escape(name)}\."}


def role_of(model: FrozenModelConfig) -> Role:
    """Return the role of a model that is never trained."""
    return "resident" if model.rests_on == "device" else "reference"


def load_packed(
    cfg: ModelConfig,
    meshes: ModelMeshes,
    build: Callable[[PreTrainedModel, Kernel], ModelT],
    *,
    role: Role,
    kernel: Kernel | None,
    quantized: QuantizedBase | None = None,
    start: Callable[[PreTrainedModel], Mapping[str, torch.Tensor]] | None = None,
) -> ModelT:
    """Build the model on the meta device, shard it, and load the directory's weights. Those that `start` names may be
    missing, and then begin with its values, which are whole."""
    device = torch.device(meshes.dense.device_type)
    dtype = compute_dtype(cfg.compute_dtype, device.type)
    waits = role in ("reference", "resident")  # for its next forward pass, and never for a backward pass
    on_host = role == "reference" or (cfg.cpu_offload and not waits)
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if on_host else None
    built: list[ModelT] = []
    check_compiler(device)

    def shard(model: PreTrainedModel) -> None:
        chosen = kernel or choose_kernel(cfg.attention, device.type, dtype)
        if cfg.attention == "auto" and chosen == "varlen":
            chosen = "flash_attn_2" if is_for_ring_attention(model, meshes) else fastest_varlen(model)
        policy = build(model, chosen)
        model.tie_weights()  # before sharding, so that FSDP sees tied weights as one parameter
        operators = operators_of(chosen)
        # A model besides the policy may have no experts, of which the policy has some.
        layout = dataclasses.replace(meshes, expert=None) if waits and not has_experts(model) else meshes
        replace_layers(model, operators, device_type=device.type, meshes=layout, quantized=quantized)
        # A root stays gathered between forward and backward, where there is one.
        shard_policy(
            policy,
            layout,
            dtype=dtype,
            offload=offload,
            reshard_root=waits,
            reshard_layers=cfg.reshard_after_forward or waits,
            ignored=quantized_weights(model),
        )
        prefetch_layers(decoder_layers(model), num_ahead=cfg.prefetch_layers)
        built.append(policy)

    def distribute(_cls: type, model: PreTrainedModel, *_: Any) -> PreTrainedModel:
        shard(model)
        return model

    # transformers calls this hook after it has built a model and before it reads weights. Parameters that are then
    # DTensors it reads shard by shard. Its own hook (5.19) does not support fp16, offload without a GPU, a single rank,
    # or a subset of the ranks.
    model, problems = _from_pretrained(
        cfg,
        {"maybe_distribute_model": classmethod(distribute)},
        dtype=dtype if role == "base" else torch.float32,
        distributed_config=DistributedConfig(tp_size=1, fsdp_size=1),
        ignore_mismatched_sizes=True,  # they are named below, without a traceback
    )
    started = {} if start is None else {name: x for name, x in start(model).items() if name in problems["missing_keys"]}
    if missing := sorted(problems["missing_keys"] - started.keys()):
        raise UserError(lacking(cfg.path, missing))
    if mismatched := sorted(problems["mismatched_keys"]):
        name, shape, expected = mismatched[0]
        raise UserError(
            f'model.path = "{cfg.path}" holds {len(mismatched)} weights of another shape than its config.json '
            f"requires; the first is {name}: {list(shape)} instead of {list(expected)}"
        )
    (policy,) = built
    materialize_shards(policy, torch.device("cpu") if offload else device, buffers=device)
    for name, whole in started.items():
        _fill(model.get_parameter(name), whole)
    model.eval()  # no dropout: the engine has none, and the ratio must be exactly 1 before the first update
    if cfg.gradient_checkpointing != "none" and not waits:
        checkpoint_layers(
            model,
            [*decoder_layers(model), *policy.trunk.tower_blocks],
            recomputed=cfg.gradient_checkpointing,
            every_layers=cfg.checkpoint_every_layers,
        )
    policy.requires_grad_(role == "trained")
    for parameter in frozen_parameters(model, cfg.freeze).values():
        parameter.requires_grad_(False)
    return policy


def load_plain(cfg: ModelConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Load the directory's model as transformers has it, whole and on the host. Raises UserError like `load_policy`."""
    model, problems = _from_pretrained(cfg, {}, dtype=dtype)
    if problems["missing_keys"]:
        raise UserError(lacking(cfg.path, sorted(problems["missing_keys"])))
    return model


def _from_pretrained(
    cfg: ModelConfig, hooks: Mapping[str, Any], *, dtype: torch.dtype, **options: Any
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Build the model and read its weights by transformers, with these methods in the place of its own."""
    config = load_model_config(cfg)
    model_class = type(model_without_memory(config, cfg))

    def read(model: PreTrainedModel, _: Any, files: Any, load_config: Any, *others: Any) -> Any:
        with _ranks_without_experts(load_config.weight_mapping or ()):
            return model_class._load_pretrained_model(model, stored_weights(cfg.path), files, load_config, *others)

    # transformers (5.19) takes a state dict in the place of a directory, but not with one.
    own = {"_load_pretrained_model": staticmethod(read), **hooks}
    hooked: Any = type(model_class.__name__, (model_class,), own)
    hooked.__module__ = model_class.__module__
    try:
        with quiet_transformers(logging.ERROR):
            return hooked.from_pretrained(
                cfg.path,
                config=config,
                dtype=dtype,
                attn_implementation=attention_of(config),
                output_loading_info=True,
                trust_remote_code=cfg.trust_remote_code,
                **options,
            )
    except (SafetensorError, OSError) as error:
        raise UserError(f'model.path = "{cfg.path}": its weights cannot be read: {error}') from error
    except RuntimeError as error:
        if "conversion of the weights" not in str(error):
            raise
        raise UserError(
            f'model.path = "{cfg.path}": its weights cannot be made of the tensors in its files, of which one may be '
            "missing, such as an expert of a layer"
        ) from error


class _OrNoExperts(MergeModulelist):
    """The operations that fuse the experts of files, on a rank that may own none of them: transformers (5.24) stacks
    what a rank owns, and fails where that is nothing."""

    def __init__(self, operations: Sequence[ConversionOps]) -> None:
        super().__init__()
        self._operations = operations

    def convert(self, input_dict: dict[str, Any], **options: Any) -> dict[str, Any]:
        """Fuse the experts, or return the rank's shard, which is empty."""
        if not any(input_dict.values()):
            shard = options["model"].get_parameter(options["full_layer_name"]).to_local()
            return {options["target_patterns"][0]: torch.empty(shard.shape, dtype=shard.dtype)}
        for operation in self._operations:
            input_dict = operation.convert(input_dict, **options)
        return input_dict


@contextmanager
def _ranks_without_experts(conversions: Iterable[WeightRenaming | WeightConverter]) -> Iterator[None]:
    """Surround reading, where fewer experts than ranks may share a parameter."""
    fusing = [
        (one, one.operations)
        for one in conversions
        if isinstance(one, WeightConverter) and any(isinstance(each, MergeModulelist) for each in one.operations)
    ]
    for converter, operations in fusing:
        converter.operations = [_OrNoExperts(operations)]
    try:
        yield
    finally:  # an export reverts the operations
        for converter, operations in fusing:
            converter.operations = operations


@torch.no_grad()
def materialize_shards(policy: PackedModel, device: torch.device, *, buffers: torch.device) -> None:
    """Copy every shard into memory of its own on `device`, and quantize what is to be in few bits. Buffers, which FSDP
    leaves where they are, go to where the model computes.

    safetensors maps files lazily. Without the copy, weights on the host would be read at first use, and would change
    when someone overwrites the directory. What transformers has put onto a CUDA device has memory of its own already.
    """
    holders: dict[int, list[tuple[nn.Module, str]]] = {}  # tied weights have several holders and stay one parameter
    for module in policy.modules():
        if isinstance(module, QuantizedLinear):
            module.keep(module.weight.to(device))
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:
                continue  # it describes what is stored elsewhere
            holders.setdefault(id(parameter), []).append((module, name))
    num_freed_bytes = 0
    for places in holders.values():
        module, name = places[0]
        # No reference to the old shard remains here, so it is freed before the next one is copied.
        copied = _copied_shard(getattr(module, name), device)
        if copied is getattr(module, name):
            continue
        for module, name in places:
            setattr(module, name, copied)
        num_freed_bytes += getattr(module, name).to_local().nbytes
        if num_freed_bytes > _MAX_FREED_BYTES:  # of memory in pieces into which the next shards do not fit
            return_freed_memory()
            num_freed_bytes = 0
    for module in policy.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module.register_buffer(name, buffer.to(buffers), persistent=name not in module._non_persistent_buffers_set)


@torch.no_grad()
def _fill(parameter: nn.Parameter, whole: torch.Tensor) -> None:
    """Write this rank's part of a whole tensor, which every rank has, into a sharded parameter."""
    assert isinstance(parameter, DTensor), "a parameter was not sharded"
    own = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.to_local().copy_(own.to_local())


def _fills_its_memory(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes


def _copied_shard(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    """Copy a sharded parameter into memory of its own on `device`."""
    assert isinstance(parameter, DTensor), "a parameter was not sharded"
    local = parameter.to_local()
    if local.device.type == device.type == "cuda" and _fills_its_memory(local):
        return parameter
    copy = torch.empty(local.shape, dtype=local.dtype, device=device).copy_(local)
    # Not from_local, which would move the copy to the mesh's device: offloaded shards live on the host.
    return nn.Parameter(DTensor(copy, parameter._spec, requires_grad=False), requires_grad=parameter.requires_grad)


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a model's parameters, tied ones once, and the buffers in its state dict."""
    names = model.state_dict(keep_vars=True).keys()  # keep_vars touches no tensor: parameters may be asleep
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in names}
    return dict(model.named_parameters()) | buffers
