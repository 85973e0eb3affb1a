"""Start, call and end the processes of one SGLang engine.

`sglang.Engine` is made to live inside a process that has more to do: what it changes here (environment, signal
handlers, start method, event loop policy, logging) is put back, its event loop runs in a thread of its own, the death
of one of its processes is an exception, and ending it ends nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import importlib.util
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import types
import warnings
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroup, Store
from torch.multiprocessing import reductions

from spmdrl.dist.session import outside_default_group
from spmdrl.engine.protocol import EngineDied
from spmdrl.engine.sglang.libraries import SETUP
from spmdrl.engine.sglang.requests import take_numbers_from_requests
from spmdrl.engine.sglang.surroundings import OWNER_VARIABLE, stand_ins
from spmdrl.refit.bucket import Entry
from spmdrl.types import UserError
from spmdrl.workers.folders import LockedFolder

T = TypeVar("T")

SUPPORTED_VERSION = "0.5.23"
CLOSE_LIMIT_S = 10.0
POLL_S = 0.5  # how soon the death of a process is noticed

# The engine's processes must not see torchrun's variables; with TORCHELASTIC_USE_AGENT_STORE they would wait for ever
# for a store that nobody hosts.
_TORCHRUN_PREFIXES = ("TORCHELASTIC_", "GROUP_", "ROLE_", "PET_")
_TORCHRUN_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_ALLOCATOR_NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_child_failed = threading.Event()  # a rank has one engine


def _note_failed_child(*_: Any) -> None:
    """Handle SIGQUIT, which a process of the engine that cannot continue sends to the one that started it.

    A module's function, not a method: the engine's arguments are pickled.
    """
    _child_failed.set()


def check_installed() -> None:
    """Raise UserError when sglang is missing, or is another version than the one whose internals we use."""
    if importlib.util.find_spec("sglang") is None:
        raise UserError(f'rollout.engine = "sglang" needs SGLang, which is not installed; {SETUP}')
    installed = importlib.metadata.version("sglang")
    if installed != SUPPORTED_VERSION:
        raise UserError(
            f'rollout.engine = "sglang" works with SGLang {SUPPORTED_VERSION}, but {installed} is installed; {SETUP}'
        )
    if torch.cuda.is_available() and importlib.util.find_spec("torch_memory_saver") is None:
        raise UserError(
            f'rollout.engine = "sglang" needs torch_memory_saver on a GPU, to give memory back to the trainer; {SETUP}'
        )


def import_sglang() -> None:
    """Import the engine's module into this process, and undo what else the import changes."""
    if "sglang.srt.entrypoints.engine" in sys.modules:
        return
    if not torch.cuda.is_available():
        stand_ins().enable()
    policy = asyncio.get_event_loop_policy()
    with _process_wide_settings_restored(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a page about kernels that are not for this device
        import sglang.srt.entrypoints.engine  # noqa: F401
    if not torch.cuda.is_available():
        stand_ins().without_torchvision(sys.modules["sglang.srt.managers.tokenizer_manager"])
    asyncio.set_event_loop_policy(policy)


def argument_types() -> dict[str, Any]:
    """Map the names of the arguments that sglang's engine takes to their types."""
    import_sglang()
    import msgspec
    from sglang.srt.server_args import ServerArgs

    return {field.name: field.type for field in msgspec.structs.fields(ServerArgs)}


def type_problem(value: Any, kind: Any) -> str | None:
    """Explain why a value does not have one of the `argument_types`; None when it does or cannot be checked."""
    import msgspec

    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        return str(error)
    except TypeError:  # a type that msgspec cannot check
        return None
    choices = next((found for x in getattr(kind, "__metadata__", ()) if (found := getattr(x, "choices", None))), None)
    if choices and isinstance(value, str) and value not in choices:
        return f"Expected one of {', '.join(map(str, choices))}"
    return None


def knows_architecture(name: str) -> bool:
    """Return True when sglang has a model class of this name. Reads its sources: importing all of them is slow."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.submodule_search_locations
    models = Path(spec.submodule_search_locations[0], "srt", "models")
    return any(f"class {name}(" in path.read_text(encoding="utf-8") for path in models.rglob("*.py"))


def share_tensors(device_type: str) -> None:
    """Allow this process to hand tensors to the engine's processes; call it once, before the first tensor."""
    # File descriptors travel over a connection that is guarded by a key, and torchrun's ranks have different ones.
    torch.multiprocessing.set_sharing_strategy("file_system")
    if device_type == "cuda":
        import_sglang()
        from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

        monkey_patch_torch_reductions()  # handles then name a device by its UUID, which is the same everywhere
        reductions.reduce_tensor = _reduce_tensor
        reductions.init_reductions()


def _reduce_tensor(tensor: Tensor) -> tuple[Any, ...]:
    """Reduce a tensor on a device as SGLang does, whose function knows no other, and one in host memory as torch does.

    Adapters are sent from host memory, whatever the device.
    """
    from sglang.srt.utils.patch_torch import _reduce_tensor_modified

    original = reductions._reduce_tensor_original  # type: ignore[attr-defined]  # where SGLang keeps it
    reduced: tuple[Any, ...] = (_reduce_tensor_modified if tensor.is_cuda else original)(tensor)
    return reduced


class Handle:
    """A tensor that unpickles, in another process, as a tensor in this process's memory.

    Made once for a tensor on a CUDA device, however often it is sent: torch counts and keeps what it makes for each
    handle as long as the memory lives.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._reduced = reductions.reduce_tensor(tensor)

    def __reduce__(self) -> tuple[Any, ...]:
        return self._reduced


def serialized(name: str, handle: Handle) -> bytes:
    """Serialize a named tensor for one process, which may open it once."""
    import_sglang()
    from sglang.srt.utils import MultiprocessingSerializer

    return MultiprocessingSerializer.serialize([(name, handle)])


def flattened_metadata(entries: Sequence[Entry]) -> list[Any]:
    """Describe tensors that lie in one memory in sglang's words."""
    import_sglang()
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata

    return [
        FlattenedTensorMetadata(x.name, x.shape, x.dtype, x.start, x.start + x.num_bytes, x.num_bytes) for x in entries
    ]


def serialized_adapters(tensors: Sequence[Any], flat: Tensor) -> bytes:
    """Serialize tensors in host memory `flat` [num_bytes] uint8, by their `flattened_metadata`, for one process, which
    may open it once."""
    import_sglang()
    from sglang.srt.utils import MultiprocessingSerializer

    return MultiprocessingSerializer.serialize({"flattened_tensor": flat, "metadata": tensors})


def sglang_checksum(tensor: Tensor) -> str:
    """Compute SGLang's own checksum of a weight, 16 hexadecimal digits."""
    import_sglang()
    from sglang.srt.managers.mm_utils import tensor_hash

    return f"{tensor_hash(tensor):016x}"


def update_group(store: Store, name: str, *, num_ranks: int, backend: str) -> ProcessGroup:
    """Join the group `name`, in which engines receive weights, as rank 0. Waits for the others."""
    import_sglang()
    from sglang.srt.utils import init_custom_process_group

    # The engines put the group's name before their keys.
    with outside_default_group():
        return init_custom_process_group(
            backend=backend, store=PrefixStore(name, store), world_size=num_ranks, rank=0, group_name=name
        )


class SGLangProcess:
    """One running engine: the scheduler of each of its devices, and a connection to them.

    Must be made in the main thread: the processes die with the thread that started them.
    """

    def __init__(self, arguments: Mapping[str, Any], *, environment: Mapping[str, str], owner: str) -> None:
        """Start with sglang's own `arguments`; `environment` is for the engine's processes only. Blocks until ready.

        Raises EngineDied when a process ends before that.
        """
        import_sglang()
        from sglang.srt.entrypoints.engine import Engine

        from spmdrl.engine.sglang.scheduler import run_scheduler

        class OwnEngine(Engine):
            run_scheduler_process_func = staticmethod(run_scheduler)

            @classmethod
            def _launch_detokenizer_subprocesses(cls, **_: Any) -> tuple[list[Any], list[str]]:
                """Start none: the schedulers answer this process, with tokens (`skip_tokenizer_init`)."""
                return [], []

            def shutdown(self) -> None:
                """Do nothing: the original kills every child of its process, not only its own."""

        _child_failed.clear()
        before = set(multiprocessing.active_children())
        self._sockets = LockedFolder()  # that only this user can open, whatever the umask
        try:
            with _launch_surroundings(dict(environment) | {OWNER_VARIABLE: owner}, sockets=self._sockets.path):
                self._engine = OwnEngine(**arguments, custom_sigquit_handler=_note_failed_child)
        except Exception as error:  # whatever sglang's own checks raise
            for process in set(multiprocessing.active_children()) - before:
                process.kill()
            self._sockets.remove()
            raise EngineDied(f"SGLang did not start: {type(error).__name__}: {error}") from error
        self._manager = self._engine.tokenizer_manager
        take_numbers_from_requests(self._manager.mm_processor)
        watchdog = self._manager._subprocess_watchdog
        watchdog.stop()  # it would ask for a SIGQUIT; `require_alive` checks itself
        self._processes: dict[str, Any] = dict(zip(watchdog._names, watchdog._processes, strict=True))
        # In a thread: it always runs, so replies are read while this thread computes, and sglang, which installs
        # signal handlers for a loop in the main thread, leaves them alone.
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sglang-loop", daemon=True)
        self._thread.start()
        self._sigquit = signal.signal(signal.SIGQUIT, _note_failed_child)

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the engine's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def result(self, future: Future[T]) -> T:
        """Wait for it. Raises EngineDied, within seconds, when the engine dies meanwhile."""
        while not future.done():
            self.require_alive()
            with contextlib.suppress(TimeoutError):
                future.exception(timeout=POLL_S)
        return future.result()

    def ask(self, method: str, request: str, **fields: Any) -> Any:
        """Call the tokenizer manager's `method` with sglang's `request` type made of these fields."""
        return self.result(self.start(self.asking(method, request, **fields)))

    async def asking(self, method: str, request: str, **fields: Any) -> Any:
        """Do what `ask` does, on the engine's loop. Raises RuntimeError for a failure, which sglang only returns."""
        from sglang.srt.managers import io_struct

        reply = await getattr(self._manager, method)(getattr(io_struct, request)(**fields))
        if isinstance(reply, tuple) and not reply[0]:
            raise RuntimeError(f"SGLang refused {method}: {reply[1]}")
        if isinstance(reply, io_struct.LoRAUpdateOutput) and not reply.success:
            raise RuntimeError(f"SGLang refused {method}: {reply.error_message}")
        return reply

    async def generate(
        self,
        token_ids: Sequence[int],
        sampling: Mapping[str, Any],
        request_id: str,
        adapters: str | None = None,
        fields: Mapping[str, Any] = types.MappingProxyType({}),
    ) -> dict[str, Any]:
        """Sample one response, with the adapters of this name and other fields of sglang's request; returns sglang's
        answer: output_ids and meta_info."""
        from sglang.srt.managers.io_struct import GenerateReqInput

        request = GenerateReqInput(
            input_ids=list(token_ids),
            sampling_params=dict(sampling),
            return_logprob=True,
            rid=request_id,
            lora_path=adapters,
            **fields,
        )
        return await anext(self._manager.generate_request(request, None))

    def drain(self, *, limit_s: float) -> None:
        """Wait until nothing runs, and drop the prefix cache. Raises RuntimeError when that takes more than `limit_s`.

        Call this before releasing memory or loading weights: SGLang's processes end themselves, or refuse, when they
        are not idle.
        """

        async def flush() -> bool:
            return (await self._manager.flush_cache()).success

        deadline = time.monotonic() + limit_s
        while not self.result(self.start(flush())):
            if time.monotonic() > deadline:
                raise RuntimeError(f"SGLang still has requests {limit_s:g} s after the last response")
            time.sleep(0.01)

    def abort_all(self) -> None:
        """Ask every running request to end with what it has."""

        async def abort() -> None:
            self._manager.abort_request(abort_all=True)

        self.result(self.start(abort()))

    def require_alive(self) -> None:
        """Raise EngineDied when a process has ended or has given up."""
        for name, process in self._processes.items():
            if not process.is_alive():
                raise EngineDied(f"SGLang's {name} (pid {process.pid}) {_ending(process.exitcode)}")
        if _child_failed.is_set():
            raise EngineDied("a process of SGLang has failed; its traceback is above")

    def is_dead(self) -> bool:
        """Return True when `require_alive` would raise."""
        try:
            self.require_alive()
        except EngineDied:
            return True
        return False

    @property
    def longest_tokens(self) -> int:
        """The longest sequence that the KV cache and the context length allow."""
        # SGLang's limit is 5 tokens beyond what it allows a prompt, and a response ends one before that.
        return self._engine._scheduler_init_result.scheduler_infos[0]["max_req_input_len"] + 5 - 1

    @property
    def process_ids(self) -> list[int]:
        """The ids of the engine's processes."""
        return [process.pid for process in self._processes.values()]

    def close(self) -> None:
        """End the engine's processes, and no others."""
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.join()
        asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result(timeout=CLOSE_LIMIT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        if self._engine.send_to_rpc is not None:
            self._engine.send_to_rpc.close(linger=0)
        self._remove_leftovers()
        signal.signal(signal.SIGQUIT, self._sigquit)

    def _remove_leftovers(self) -> None:
        """Remove sockets and shared memory that the processes had no time to remove."""
        from sglang.srt.managers.load_snapshot import shm_path_for

        self._sockets.remove()
        Path(shm_path_for(self._engine.port_args.instance_id)).unlink(missing_ok=True)
        for number in self.process_ids:
            for path in Path("/dev/shm").glob(f"sgl_shm_*_{number}_*"):
                path.unlink(missing_ok=True)


async def _cancel_others() -> None:
    """End every other task of the running loop."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


@contextlib.contextmanager
def _process_wide_settings_restored() -> Iterator[None]:
    """Restore environment variables and the root logger. SGLang would move the caches of the trainer's own kernels, and
    duplicate the log lines of other libraries."""
    environment = dict(os.environ)
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        root.setLevel(level)
        root.handlers[:] = handlers


@contextlib.contextmanager
def _launch_surroundings(environment: Mapping[str, str], *, sockets: str) -> Iterator[None]:
    """Prepare this process for `Engine()` to start its processes, and restore everything afterwards.

    The sockets by which they talk, temporary files to SGLang, are made in the folder `sockets`.
    """
    saved_signals = {number: signal.getsignal(number) for number in (signal.SIGQUIT, signal.SIGTERM)}
    saved_method = multiprocessing.get_start_method(allow_none=True)
    main, temporary = sys.modules["__main__"], tempfile.tempdir
    try:
        tempfile.tempdir = sockets
        with _process_wide_settings_restored(), warnings.catch_warnings():
            for name in list(os.environ):
                if name in _TORCHRUN_NAMES or name.startswith(_TORCHRUN_PREFIXES):
                    del os.environ[name]
                elif name in _ALLOCATOR_NAMES and "expandable_segments" in os.environ[name]:
                    del os.environ[name]  # the engine's memory could neither be released nor shared
            os.environ.update(environment)
            # Spawned processes import the main module of their parent again: ours takes seconds and is of no use.
            sys.modules["__main__"] = types.ModuleType("__main__")
            warnings.simplefilter("ignore")
            logging.disable()  # what fails here is raised; the engine's processes have loggers of their own
            yield
    finally:
        logging.disable(logging.NOTSET)
        sys.modules["__main__"], tempfile.tempdir = main, temporary
        multiprocessing.set_start_method(saved_method, force=True)
        for number, handler in saved_signals.items():
            signal.signal(number, handler)
