"""SGLang as a `RolloutEngine`: one engine for each engine mesh, led by the mesh's first rank."""

from __future__ import annotations

import contextlib
import itertools
import queue
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from spmdrl.dist.collectives import failing_together, gather_objects, host_barrier
from spmdrl.engine.protocol import EngineDied
from spmdrl.engine.requests import RequestQueue
from spmdrl.engine.sglang import loader as sglang_loader
from spmdrl.engine.sglang import process as sglang_process
from spmdrl.engine.sglang.layout import Share, held_weights
from spmdrl.engine.sglang.process import POLL_S, SGLangProcess
from spmdrl.refit.bucket import Bucket
from spmdrl.refit.sink import Naming
from spmdrl.types import FinishReason, Request, Response, Span, UserError

SETTLE_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What an engine is started with."""

    arguments: Mapping[str, Any]  # sglang's own
    environment: Mapping[str, str]  # of its processes
    owner: str  # says whose processes they are
    release: frozenset[str]  # kinds of memory given back while the trainer works: kv_cache, weights, cuda_graph
    max_running: int  # requests in flight
    longest_tokens: int  # of a prompt and its response


class SGLangEngine:
    """See `RolloutEngine`. Every rank of the mesh makes one; the first rank's has the processes behind it."""

    naming: Naming = "checkpoint"

    def __init__(self, launch: Launch, mesh: DeviceMesh, *, model_config: Any, transport: str) -> None:
        """Start the engine; returns on every rank of the mesh when it is ready. Raises EngineDied on the first rank
        when it did not start."""
        self.leads = mesh.get_local_rank() == 0
        self.version = -1
        self._launch = launch
        self._mesh = mesh
        self._share = Share.of(
            model_config,
            rank=mesh.get_local_rank(),
            size=mesh.size(),
            device_type=mesh.device_type,
            on_policy=launch.arguments.get("rl_on_policy_target") is not None,
        )
        self._device = torch.device(mesh.device_type if transport == "cuda_ipc" else "cpu")
        self._released: set[str] = set()
        self._buckets: Sequence[Bucket] = ()
        self._buffers: Sequence[Tensor] = ()
        self._parcels: list[tuple[str, sglang_process.Handle]] = []  # of each bucket: its description and its memory
        self._payloads: list[list[bytes]] = []  # of each rank of the mesh, of each bucket
        self._next_version = -1
        self._loading: Future[Any] | None = None
        self._abort = False
        self._is_idle = True
        self._names = itertools.count()
        sglang_process.share_tensors(self._device.type)
        with failing_together(mesh):  # the others wait here, on a socket
            self._process = self._start() if self.leads else None

    def _start(self) -> SGLangProcess:
        launch = self._launch
        process = SGLangProcess(launch.arguments, environment=launch.environment, owner=launch.owner)
        if process.longest_tokens < launch.longest_tokens:
            process.close()
            # SGLang would cut responses short and say that they reached their length.
            raise UserError(
                f"SGLang has room for sequences of {process.longest_tokens} tokens, but a prompt and its response may "
                f"have {launch.longest_tokens}; raise rollout.memory_fraction or rollout.max_kv_tokens, or lower "
                "data.max_prompt_tokens or rollout.max_response_tokens"
            )
        return process

    def generate(self, requests: Iterable[Request | None]) -> Iterator[tuple[int, Response]]:
        """See `RolloutEngine.generate`. Raises EngineDied, within seconds, when a process of the engine ends."""
        if self._process is None:
            return
        assert self.version >= 0, "the engine has no weights: refit before sampling"
        assert not self._released, f"the engine sleeps, without its {', '.join(self._released)}: wake it first"
        self._abort = self._is_idle = False
        source = RequestQueue(requests)
        finished: queue.SimpleQueue[tuple[int, Future[dict[str, Any]]]] = queue.SimpleQueue()
        running = 0
        while True:
            for index, request in source.take(0 if self._abort else self._launch.max_running - running):
                self._submit(index, request, finished)
                running += 1
            if not running:
                assert self._abort or source.is_empty, "nothing is running, so the caller must have another request"
                return
            if (answered := _first(finished)) is not None:
                index, answer = answered
                running -= 1
                response = _response(answer.result())
                if response.finish_reason == "abort" and not self._abort:
                    raise RuntimeError(f"SGLang gave up a request by itself: {answer.result()['meta_info']}")
                yield index, response
            self._process.require_alive()
            source.ask_again()

    def _submit(self, index: int, request: Request, finished: queue.SimpleQueue[Any]) -> None:
        assert self._process is not None
        token_ids = request.prompt_ids + request.response_ids
        answer = self._process.start(
            self._process.generate(token_ids, _sampling_params(request), f"{next(self._names)}")
        )
        answer.add_done_callback(lambda done: finished.put((index, done)))

    def abort(self) -> None:
        """See `RolloutEngine.abort`."""
        self._abort = True
        if self._process is not None:
            with contextlib.suppress(EngineDied):  # `generate` says so
                self._process.abort_all()

    def sleep(self) -> None:
        """See `RolloutEngine.sleep`: give back the kinds of memory that `offload.engine` names."""
        self._settle()
        tags = sorted(self._launch.release - self._released)
        if self._process is not None and tags:
            self._process.ask("release_memory_occupation", "ReleaseMemoryOccupationReqInput", tags=tags)
        self._released |= self._launch.release

    def wake(self) -> None:
        """See `RolloutEngine.wake`. Released weights came back in `begin_update`: before that they hold nothing."""
        assert "weights" not in self._released, "the engine's weights were released: refit before waking it"
        self._resume(self._released)

    def _settle(self) -> None:
        """Wait until the engine knows that nothing runs: it says a response is finished a moment before."""
        if self._process is not None and not self._is_idle:
            self._process.drain(limit_s=SETTLE_LIMIT_S)
        self._is_idle = True

    def _resume(self, tags: set[str]) -> None:
        if self._process is not None and tags:
            self._process.ask("resume_memory_occupation", "ResumeMemoryOccupationReqInput", tags=sorted(tags))
        self._released -= tags

    def allocate(self, num_bytes: int) -> Tensor:
        """See `WeightSink.allocate`: memory that the engine's processes can open."""
        memory = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        if memory.is_cuda:
            return memory
        memory.share_memory_()
        if self._mesh.device_type == "cuda":
            _pin(memory)
        return memory

    def begin_update(self, buckets: Sequence[Bucket], buffers: Sequence[Tensor], *, version: int) -> None:
        """See `WeightSink.begin_update`. One gather brings every rank's handles to the rank that leads."""
        with _death_told_later():
            self._settle()
            self._resume(self._released & {"weights"})
        if buckets is not self._buckets or buffers is not self._buffers:
            self._buckets, self._buffers = buckets, buffers
            self._parcels = [self._parcel(number) for number in range(len(buckets))]
        self._next_version = version
        # Anew for each refit: a handle to host memory counts how often it was opened, and may be opened once.
        mine = [sglang_process.serialized(*parcel) for parcel in self._parcels]
        self._payloads = gather_objects(self._mesh, mine)
        if self._process is not None:
            with _death_told_later():
                self._process.ask("begin_weight_update", "BeginWeightUpdateReqInput", selector="all")

    def _parcel(self, number: int) -> tuple[str, sglang_process.Handle]:
        bucket, buffer = self._buckets[number], number % len(self._buffers)
        stays_open = self._device.type == self._mesh.device_type
        description = sglang_loader.described(bucket, buffer=buffer, stays_open=stays_open)
        return description, sglang_process.Handle(self._buffers[buffer][: bucket.num_bytes])

    def load(self, number: int) -> None:
        """See `WeightSink.load`. The last bucket brings the version, and drops the cache of the old weights."""
        assert self._loading is None, "wait for the bucket before"
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # another process cannot see what this one's stream has yet to do
        # Every rank has filled its buffer, and the rank that leads has waited for the bucket before.
        host_barrier(self._mesh)
        is_last = number == len(self._buckets) - 1
        if self._process is not None:
            self._loading = self._process.start(
                self._process.asking(
                    "update_weights_from_tensor",
                    "UpdateWeightsFromTensorReqInput",
                    serialized_named_tensors=[payloads[number] for payloads in self._payloads],
                    load_format=sglang_loader.PATH,
                    flush_cache=is_last,
                    weight_version=str(self._next_version) if is_last else None,
                )
            )

    def wait(self) -> None:
        """See `WeightSink.wait`."""
        if self._process is not None and self._loading is not None:
            with _death_told_later():
                self._process.result(self._loading)
            self._loading = None

    def end_update(self) -> None:
        """See `WeightSink.end_update`."""
        if self._process is not None:
            with _death_told_later():
                self._process.ask("end_weight_update", "EndWeightUpdateReqInput")
        self.version = self._next_version

    def digests_of(self, bucket: Bucket, flat: Tensor) -> dict[str, str]:
        """See `WeightSink.digests_of`."""
        whole = {entry.name: entry.view(flat) for entry in bucket.flat_entries}
        held = held_weights(whole, self._share)
        # SGLang's digest of a tensor on a device is another than on the host.
        return {name: sglang_process.digest(tensor.to(self._mesh.device_type)) for name, tensor in held.items()}

    def differing(self, expected: dict[str, str]) -> list[str]:
        """See `WeightSink.differing`: what each device of the engine holds against what its rank expects."""
        expectations = gather_objects(self._mesh, expected)
        if self._process is None:
            return []
        try:
            _, _, ranks, _ = self._process.ask("check_weights", "CheckWeightsReqInput", action="checksum")
        except EngineDied:  # `require_alive` says so
            return []
        held = {info["parallelism_info"][0]["tp_rank"]: info["checksums"] for info in ranks}
        return sorted(
            name
            for rank, expectation in enumerate(expectations)
            for name in expectation.keys() | held[rank].keys()
            if expectation.get(name) != held[rank].get(name)
        )

    def require_alive(self) -> None:
        """See `RolloutEngine.require_alive`."""
        if self._process is not None:
            self._process.require_alive()

    def revive(self) -> None:
        """See `RolloutEngine.revive`."""
        if not any(gather_objects(self._mesh, self._process is not None and self._process.is_dead())):
            return
        with failing_together(self._mesh):  # the others wait here, on a socket
            if self._process is not None:
                self._process.close()
                self._process = self._start()
        self.version = -1
        self._loading, self._is_idle = None, True
        self._released = set()

    def close(self) -> None:
        """See `RolloutEngine.close`."""
        if self._process is not None:
            self._process.close()


def _death_told_later() -> AbstractContextManager[None]:
    """Around what one rank asks of the engine between collectives of all: `require_alive` tells of its death."""
    return contextlib.suppress(EngineDied)


def _pin(memory: Tensor) -> None:
    """Let the device copy straight into it. It stays so to the end of the process.

    Where the system does not allow that, copies take longer and wait for themselves.
    """
    runtime = torch.cuda.cudart()
    if runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0) != runtime.cudaError.success:
        # CUDA keeps an error until someone asks: the next kernel would raise this one, which is not its own.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")


def _first(finished: queue.SimpleQueue[tuple[int, Future[Any]]]) -> tuple[int, Future[Any]] | None:
    """What was finished first, None when nothing is for a while."""
    try:
        return finished.get(timeout=POLL_S)
    except queue.Empty:
        return None


def _sampling_params(request: Request) -> dict[str, Any]:
    return {
        "temperature": request.temperature,
        "top_p": request.top_p,
        "max_new_tokens": request.max_response_tokens - len(request.response_ids),
        "stop_token_ids": sorted(request.stop_token_ids),
        "ignore_eos": not request.stop_token_ids,
        # Used by deterministic inference, which has no form for a CPU in this release.
        "sampling_seed": request.seed,
    }


def _response(answer: Mapping[str, Any]) -> Response:
    about = answer["meta_info"]
    logprobs = about["output_token_logprobs"]
    reason: FinishReason = about["finish_reason"]["type"]
    assert reason in ("stop", "length", "abort"), about["finish_reason"]
    return Response(
        token_ids=tuple(answer["output_ids"]),
        logprobs=tuple(logprob for logprob, *_ in logprobs),
        finish_reason=reason,
        # A request that was aborted while it waited has a span without tokens.
        spans=tuple(
            Span(int(x["version"]), x["end"] - x["start"])
            for x in about.get("weight_versions") or ()
            if x["end"] > x["start"]
        ),
    )
