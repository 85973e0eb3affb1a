"""Translate the settings into the arguments of an SGLang engine, and say what is wrong with them."""

from __future__ import annotations

import contextlib
import difflib
import itertools
import os
import random
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from spmdrl.config import EXACT_BACKENDS, Config, RolloutConfig
from spmdrl.config.plan import Plan
from spmdrl.data.tokenizer import listed_end_tokens
from spmdrl.dist.session import World, local_rank
from spmdrl.engine.sglang import libraries
from spmdrl.engine.sglang import loader as sglang_loader
from spmdrl.engine.sglang import process as sglang_process
from spmdrl.engine.sglang.adapters import adapter_arguments, adapter_problems
from spmdrl.engine.sglang.fewer_bits import fewer_bits_arguments, fewer_bits_problems
from spmdrl.engine.sglang.models import (
    attention_without_packages,
    config_overrides,
    expert_problems,
    hybrid_arguments,
    hybrid_environment,
    hybrid_problems,
    rotary_problems,
)
from spmdrl.engine.sglang.requests import RouteReader, image_arguments, image_problems, route_problems
from spmdrl.engine.sglang.surroundings import check_orphans, stand_ins, startup_path
from spmdrl.engine.sglang.transport import shared_memory_problem, wanted_transport
from spmdrl.families import family_of, vision_family
from spmdrl.model.exact import sglang_kernels
from spmdrl.model.load import compute_dtype
from spmdrl.types import UserError

# Arguments of SGLang that follow from a setting of ours; those in `_FIXED` are not for the user to choose.
_OTHER_SETTING = {
    "model_path": "model.path",
    "dtype": "model.compute_dtype",
    "trust_remote_code": "model.trust_remote_code",
    "random_seed": "run.seed",
    "enable_deterministic_inference": "run.deterministic",
    "tp_size": "rollout.tp_size",
    "mem_fraction_static": "rollout.memory_fraction",
    "max_total_tokens": "rollout.max_kv_tokens",
    "max_running_requests": "rollout.max_running",
    "chunked_prefill_size": "rollout.chunked_prefill_tokens",
    "attention_backend": "rollout.attention_backend",
    "rl_on_policy_target": "true_on_policy",
    "enable_return_routed_experts": "correction.router_replay",
    "disable_cuda_graph": "rollout.cuda_graphs",
    "quantization": "rollout.quantization",
    "kv_cache_dtype": "rollout.kv_cache_dtype",
    "enable_memory_saver": "offload.engine",
    "enable_weights_cpu_backup": "offload.engine",
    "enable_lora": "[lora]",
    "max_lora_rank": "lora.rank",
    "lora_target_modules": "lora.targets",
}
_ROOM_TOKENS = 8  # SGLang ends responses a little before its limits
_FIXED = {
    "base_gpu_id",
    "context_length",
    "custom_sigquit_handler",
    "custom_weight_loader",
    "device",
    "dist_init_addr",
    "dp_size",
    "gpu_id_step",
    "load_format",
    "lora_paths",
    "lora_strict_loading",
    "max_loaded_loras",
    "nccl_port",
    "nnodes",
    "node_rank",
    "pp_size",
    "skip_tokenizer_init",
    "sleep_on_idle",
    "tokenizer_worker_num",
    "weight_version",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SGLangOptions:
    """How to start an engine."""

    arguments: Mapping[str, Any]  # sglang's own
    environment: Mapping[str, str]  # of its processes
    owner: str  # the id of the process that starts them
    release: frozenset[str]  # kinds of memory given back while the trainer works: kv_cache, weights, cuda_graph
    keeps_weights: bool = False  # on the host, while their device memory is given back
    max_running: int  # requests in flight
    longest_tokens: int  # of a prompt and its response
    routes: RouteReader | None = None  # where requests may ask for them
    max_cache_age: int = 0  # versions, of what its cache may serve to the rest of a response


def sglang_problems(
    cfg: Config, model_config: Any, stop_token_ids: frozenset[int] | None, *, num_ranks: int, device_type: str
) -> Iterator[str]:
    """Yield a sentence for each reason why `rollout.engine = "sglang"` could not start. Raises UserError when SGLang
    cannot be imported, or when processes of an earlier run are still there."""
    sglang_process.check_installed()
    if problem := _family_problem(cfg, model_config, device_type):
        of_model = _architecture_problems(cfg.model.path, model_config.architectures)
        yield next(
            itertools.chain(of_model, image_problems(cfg, model_config)), problem
        )  # these stay when it is lifted
        return
    if device_type == "cuda" and (problem := libraries.kernel_problem(torch.__version__)):
        raise UserError(f'rollout.engine = "sglang": {problem}')
    if local_rank() == 0:  # one rank of each machine checks
        check_orphans()
    if device_type == "cuda":
        yield from _device_problems(cfg, model_config)
    yield from _argument_problems(cfg.rollout.sglang)
    yield from _graph_problems(cfg)
    engine_ranks = cfg.rollout.num_ranks or num_ranks
    yield from _parallel_problems(cfg.rollout, model_config, num_ranks=engine_ranks, device_type=device_type)
    yield from _placement_problems(cfg.rollout.tp_size, first=num_ranks - engine_ranks, num_ranks=num_ranks)
    if cfg.refit.transport == "cuda_ipc" and device_type != "cuda":
        yield 'refit.transport = "cuda_ipc" needs a CUDA device, and there is none; set it to "auto"'
    elif (
        cfg.rollout.placement == "colocated"
        and wanted_transport(cfg.refit.transport, device_type) == "shared_memory"
        and (problem := shared_memory_problem(cfg, model_config, num_ranks=num_ranks))
    ):
        yield problem
    yield from _architecture_problems(cfg.model.path, model_config.architectures)
    yield from adapter_problems(cfg, model_config, device_type=device_type)
    yield from expert_problems(cfg.model.path, model_config)
    yield from hybrid_problems(cfg, model_config, device_type=device_type)
    yield from image_problems(cfg, model_config)
    yield from route_problems(cfg, model_config)
    yield from fewer_bits_problems(cfg, model_config, device_type=device_type)
    yield from _cache_problems(cfg)
    yield from rotary_problems(cfg.model.path, model_config)
    if cfg.run.deterministic and device_type == "cpu":
        yield (
            'run.deterministic = true cannot be kept with rollout.engine = "sglang" on a CPU, where SGLang ignores '
            'seeds; set it to false, or rollout.engine = "torch"'
        )
    ends = _own_end_tokens(cfg, model_config)
    if stop_token_ids is not None and (missing := ends - stop_token_ids):
        yield (
            f"responses end at {sorted(stop_token_ids)}, but SGLang always stops at {sorted(missing)} as well, "
            f"end-of-sequence tokens of the model; set rollout.stop_token_ids = {sorted(ends | stop_token_ids)}"
        )
    eval_tokens = (cfg.eval.max_response_tokens if cfg.eval else None) or 0
    longest, what = max(
        (cfg.data.max_prompt_tokens + max(cfg.rollout.max_response_tokens, eval_tokens), "prompt and its response"),
        (cfg.reward.max_judged_tokens, "question to the policy as a judge and its answer"),
    )
    if cfg.rollout.max_kv_tokens is not None and cfg.rollout.max_kv_tokens < longest + _ROOM_TOKENS:
        yield (
            f"rollout.max_kv_tokens = {cfg.rollout.max_kv_tokens} cannot hold one {what} of together {longest} tokens; "
            f"set it to {longest + _ROOM_TOKENS} or more"
        )
    if (backend := cfg.rollout.attention_backend) is not None:
        kind = sglang_process.argument_types()["attention_backend"]
        if problem := sglang_process.type_problem(backend, kind):
            yield f'rollout.attention_backend = "{backend}": {problem[0].lower()}{problem[1:]}'


def _family_problem(cfg: Config, model_config: Any, device_type: str) -> str | None:
    """Return a sentence when SGLang does not compute the models of a type, or nobody has seen that it does."""
    family, instead = family_of(model_config.get_text_config()).sglang, 'set rollout.engine = "torch"'
    if family.differs:
        why = f"whose class in SGLang {sglang_process.SUPPORTED_VERSION} {family.differs}"
    elif family.not_on_cpu and device_type == "cpu":
        why = f"for which SGLang {sglang_process.SUPPORTED_VERSION} computes no {family.not_on_cpu} on a CPU"
    elif not family.is_tried and not cfg.rollout.allow_untested:
        why = "which was not tried with SGLang: nothing says that it computes what the trainer does"
        instead += (
            ", or rollout.allow_untested = true to try it: weights are compared by digest, and mismatch/max_abs_nats "
            "says how far SGLang is from the trainer"
        )
    else:
        return None
    return f'model.path = "{cfg.model.path}" has the type {model_config.model_type}, {why}; {instead}'


def _cache_problems(cfg: Config) -> Iterator[str]:
    if cfg.rollout.cache_after_refit != "keep":
        return
    if cfg.sends_adapters:
        yield (
            'rollout.cache_after_refit = "keep": SGLang caches apart what each version of the adapters of [lora] has '
            'read, and would read it again; set it to "recompute", or lora.merge = true'
        )
    if cfg.rollout.placement == "colocated" and cfg.offload.engine:
        yield (
            'rollout.cache_after_refit = "keep": SGLang drops its cache before it gives any memory back; set '
            'offload.engine = [], or cache_after_refit = "recompute"'
        )


def _device_problems(cfg: Config, model_config: Any) -> Iterator[str]:
    capability = torch.cuda.get_device_capability()
    # With true_on_policy the trainer needs the same kernels, and says so itself.
    is_chosen = {"prefill_attention_backend", "decode_attention_backend"} <= cfg.rollout.sglang.keys()
    instead = attention_without_packages(model_config)
    if not is_chosen and cfg.rollout.attention_backend == "triton" != instead:
        yield (
            f'rollout.attention_backend = "triton": SGLang does not take it for {model_config.model_type}, whose first '
            f'layer may have no attention; leave it out, or set it to "{instead}"'
        )
    if not (cfg.true_on_policy or is_chosen) and (
        problem := libraries.attention_problem(cfg.rollout.attention_backend, capability, instead=instead)
    ):
        yield problem
    if vision_family(model_config) is not None:  # a tower has kernels of its own, which are imported at an image
        of_tower = {"setting": "rollout.sglang.mm_attention_backend", "instead": "triton_attn"}
        chosen = cfg.rollout.sglang.get("mm_attention_backend")
        if problem := libraries.attention_problem(chosen, capability, **of_tower):
            yield problem
    has_saver = cfg.rollout.placement == "colocated"
    if has_saver and (problem := libraries.start_problem(libraries.library_path())):
        yield (
            'rollout.engine = "sglang": its processes load the library of torch_memory_saver first, and with it no '
            f"process starts here: {problem}; put the folder of what is missing on {libraries.PATH_VARIABLE}"
        )


def _graph_problems(cfg: Config) -> Iterator[str]:
    """Yield a sentence when CUDA graphs of prompts would hold memory that the trainer counts on."""
    backend = _prompt_graphs(cfg.rollout.sglang)
    if backend == "disabled" or cfg.rollout.placement != "colocated":
        return
    if backend == "breakable":
        yield (
            "rollout.sglang: CUDA graphs of prompts that are breakable, which is SGLang's default, keep their memory "
            'while the trainer works; set cuda_graph_backend_prefill = "full" there and add "cuda_graph" to '
            "offload.engine, or leave prompts without graphs"
        )
    elif "cuda_graph" not in cfg.offload.engine:
        yield (
            f'rollout.sglang: CUDA graphs of prompts ("{backend}") keep their memory while the trainer works; add '
            '"cuda_graph" to offload.engine, or leave prompts without graphs'
        )


def _prompt_graphs(given: Mapping[str, Any]) -> str:
    """Name the kind of CUDA graph that prompts have with these arguments on top of ours, as SGLang reads them."""
    config = given.get("cuda_graph_config")
    of_prompts = config.get("prefill") if isinstance(config, dict) else None
    explicit = of_prompts.get("backend") if isinstance(of_prompts, dict) else None
    by_default = "disabled" if given.get("disable_prefill_cuda_graph", True) else "breakable"
    return explicit or given.get("cuda_graph_backend_prefill") or by_default


def _argument_problems(given: dict[str, Any]) -> Iterator[str]:
    if not given:
        return
    known = sglang_process.argument_types()
    for name, value in given.items():
        if name in _OTHER_SETTING:
            yield f"rollout.sglang.{name} follows from {_OTHER_SETTING[name]}; set that instead"
        elif name in _FIXED:
            yield f"rollout.sglang.{name} is not for the user to choose: spmdrl sets it; remove it"
        elif name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            yield f"rollout.sglang.{name}: SGLang {sglang_process.SUPPORTED_VERSION} has no such argument{hint}"
        elif problem := sglang_process.type_problem(value, known[name]):
            yield f"rollout.sglang.{name} = {value!r}: {problem[0].lower()}{problem[1:]}"


def _architecture_problems(path: str, architectures: Sequence[str] | None) -> Iterator[str]:
    if not architectures:
        yield (
            f'model.path = "{path}": its config.json names no architecture, and SGLang finds its model by that; add '
            '"architectures" there, or set rollout.engine = "torch"'
        )
    elif not sglang_process.knows_architecture(architectures[0]):
        yield (
            f'model.path = "{path}" has the architecture {architectures[0]}, which SGLang '
            f'{sglang_process.SUPPORTED_VERSION} does not know; use a model that it does, or rollout.engine = "torch"'
        )


def _parallel_problems(rollout: RolloutConfig, model_config: Any, *, num_ranks: int, device_type: str) -> Iterator[str]:
    tp_size = rollout.tp_size
    if num_ranks % tp_size:
        yield f"rollout.tp_size = {tp_size} does not divide the {num_ranks} ranks; {_divisors(num_ranks)}"
    model_config = model_config.get_text_config()
    heads = model_config.num_attention_heads
    key_heads = getattr(model_config, "num_key_value_heads", None) or heads
    if tp_size > 1 and not family_of(model_config).sglang.is_cut and not rollout.allow_untested:
        yield (
            f"rollout.tp_size = {tp_size} with {model_config.model_type}: how SGLang cuts its weights is not known "
            'here; set it to 1, rollout.engine = "torch", or rollout.allow_untested = true to try it'
        )
    if heads % tp_size:
        yield f"rollout.tp_size = {tp_size} does not divide the model's {heads} attention heads; {_divisors(heads)}"
    elif key_heads % tp_size and (tp_size % key_heads or device_type == "cpu"):
        yield f"rollout.tp_size = {tp_size} does not divide the model's {key_heads} key heads; {_divisors(key_heads)}"


def _placement_problems(tp_size: int, *, first: int, num_ranks: int) -> Iterator[str]:
    """Yield a sentence when an engine would lie on two nodes; engines fill ranks `first` to `num_ranks` - 1 in turn."""
    on_node = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
    leaders = range(first, num_ranks - tp_size + 1, tp_size)
    if all(leader // on_node == (leader + tp_size - 1) // on_node for leader in leaders):
        return
    if not first:
        yield f"rollout.tp_size = {tp_size} does not divide the {on_node} ranks of a node; {_divisors(on_node)}"
    else:
        yield (
            f"an engine of rollout.tp_size = {tp_size} ranks would lie on two nodes of {on_node} ranks each, since "
            f"engines begin at rank {first}; set rollout.num_ranks to a multiple of {on_node}"
        )


def _divisors(number: int) -> str:
    possible = [str(n) for n in range(1, number + 1) if number % n == 0]
    return f"set it to {' or '.join([', '.join(possible[:-1]), possible[-1]] if len(possible) > 1 else possible)}"


def _own_end_tokens(cfg: Config, model_config: Any) -> set[int]:
    """Find the tokens at which SGLang always ends a response: those of the model's config and generation config."""
    own = getattr(model_config, "eos_token_id", None)
    return {*listed_end_tokens(cfg.model.path), *((own,) if isinstance(own, int) else own or ())}


def sglang_options(cfg: Config, plan: Plan, world: World, model_config: Any) -> SGLangOptions:
    """Translate the settings for the engine of this rank's engine mesh; `world` is that of the rank that leads it."""
    on_cpu = world.device.type == "cpu"
    rollout, release = cfg.rollout, frozenset(cfg.offload.engine)
    longest = plan.max_sampled_tokens
    kv_tokens = rollout.max_kv_tokens or (rollout.max_running * longest + _ROOM_TOKENS if on_cpu else None)
    dtype = f"{compute_dtype(cfg.model.compute_dtype, world.device.type)}".removeprefix("torch.")
    arguments = {
        "model_path": cfg.model.path,
        "trust_remote_code": cfg.model.trust_remote_code,
        "dtype": dtype,
        "load_format": "dummy",  # the first refit brings the weights
        "custom_weight_loader": [sglang_loader.PATH],
        "device": world.device.type,
        "base_gpu_id": world.local_rank,
        "tp_size": rollout.tp_size,
        "random_seed": cfg.run.seed % 2**31 + world.rank,  # of an engine; where requests' own seeds count, unused
        "skip_tokenizer_init": True,  # tokens in, tokens out
        "context_length": longest + _ROOM_TOKENS,
        "nccl_port": _free_port(world.local_rank),
        "max_running_requests": rollout.max_running,
        "mem_fraction_static": rollout.memory_fraction,
        "sleep_on_idle": True,  # otherwise its processes would spin while the trainer works
        "enable_deterministic_inference": cfg.run.deterministic or cfg.true_on_policy,
        "enable_memory_saver": not on_cpu and cfg.rollout.placement == "colocated",  # else it never sleeps
        "enable_return_routed_experts": cfg.correction.router_replay == "R3",
        "disable_cuda_graph": on_cpu or not rollout.cuda_graphs,
        # SGLang's default kind cannot be given back, and capturing every size up to a chunk takes long.
        "disable_prefill_cuda_graph": True,
        "log_level": "error",
    }
    arguments |= _set(
        max_total_tokens=kv_tokens,
        chunked_prefill_size=rollout.chunked_prefill_tokens,
        attention_backend=rollout.attention_backend or ("torch_native" if on_cpu else None),
        sampling_backend="pytorch" if on_cpu else None,
        grammar_backend="none" if on_cpu else None,
    )
    arguments |= fewer_bits_arguments(cfg, device_type=world.device.type)
    arguments |= adapter_arguments(cfg, plan, device_type=world.device.type)
    arguments |= hybrid_arguments(model_config) | image_arguments(model_config)
    if cfg.true_on_policy:
        arguments |= {
            "rl_on_policy_target": "fsdp",
            "attention_backend": rollout.attention_backend or EXACT_BACKENDS[0],
            "sampling_backend": "pytorch",
            "bf16_gemm_backend": "torch",
        }
    environment = {
        "PYTHONWARNINGS": "ignore",
        "SPT_NOENV": "1",  # they set their titles, which would cover the mark by which `orphans` finds them
        "PYTHONPATH": startup_path(),
        # The room beyond the longest sequence may be more than the model was made for; no token is ever put there.
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    }
    environment |= hybrid_environment(model_config, dtype=dtype)
    if on_cpu:
        environment |= stand_ins().child_environment() | {"SGLANG_CPU_OMP_THREADS_BIND": _cores(world.num_local_ranks)}
    if arguments["enable_memory_saver"]:
        environment |= libraries.library_path()
    if cfg.true_on_policy:
        environment |= sglang_kernels.ENVIRONMENT
    if not on_cpu and "cuda_graph" in release:
        environment["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] = "1"  # without it they stay
    return SGLangOptions(
        arguments=arguments | rollout.sglang | config_overrides(cfg, model_config),
        environment=environment,
        owner=f"{os.getpid()}",
        release=release,
        keeps_weights=bool(arguments.get("enable_weights_cpu_backup")),
        max_running=rollout.max_running,
        longest_tokens=longest,
        routes=RouteReader.of(cfg, model_config),
        max_cache_age=rollout.max_cache_age,
    )


def _free_port(local_rank: int) -> int:
    """Find a loopback port for the processes of this rank's engine. Engines that start together search different
    ranges, because a port that is free now is taken seconds later."""
    first = 20_000 + local_rank % 64 * 128
    for port in random.Random(os.getpid()).sample(range(first, first + 128), 128):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise UserError(f"no port from {first} to {first + 127} is free for SGLang's processes")


def _set(**arguments: Any) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if value is not None}


def _cores(num_local_ranks: int) -> str:
    """Divide the machine's cores among the devices of its engines: one device for each local rank."""
    cores = sorted(os.sched_getaffinity(0))
    per_rank = max(1, len(cores) // num_local_ranks)
    shares = [[cores[(rank * per_rank + i) % len(cores)] for i in range(per_rank)] for rank in range(num_local_ranks)]
    return "|".join(",".join(map(str, share)) for share in shares)
