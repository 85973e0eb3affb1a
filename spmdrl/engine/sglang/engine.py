"""SGLang as a `RolloutEngine`: requests in, responses out, the buckets of a refit; `__init__.py` names the files."""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from spmdrl.config import Config
from spmdrl.config.engines import ENGINES
from spmdrl.config.plan import Plan
from spmdrl.data.image_store import ImageStore
from spmdrl.dist.collectives import Link, gather_objects, host_barrier, raise_on_all_ranks
from spmdrl.dist.mesh import Meshes
from spmdrl.dist.session import listening_store
from spmdrl.engine.protocol import EngineDied, RequestQueue, RolloutEngine
from spmdrl.engine.remote import FIRST, ORDERS, RemoteEngine
from spmdrl.engine.sglang import loader as sglang_loader
from spmdrl.engine.sglang import process as sglang_process
from spmdrl.engine.sglang.adapters import AdapterSlots
from spmdrl.engine.sglang.fewer_bits import require_same_list
from spmdrl.engine.sglang.layout import TpShard, sharded_parts, sharded_weights
from spmdrl.engine.sglang.options import SGLangOptions, sglang_options, sglang_problems
from spmdrl.engine.sglang.process import POLL_S, SGLangProcess
from spmdrl.engine.sglang.requests import image_fields
from spmdrl.engine.sglang.transport import Transport, choose_transport
from spmdrl.families import family_of, vision_family
from spmdrl.refit.bucket import AdapterVersion, Bucket, Naming
from spmdrl.refit.digest import digests
from spmdrl.run import Launch
from spmdrl.types import FinishReason, Request, Response, Span, UserError

SETTLE_LIMIT_S = 60.0
_MAX_FRACTION = 0.98  # of the free device memory; SGLang computes in the rest

_Finished = queue.SimpleQueue[tuple[int, Future[dict[str, Any]]] | None]  # None wakes the one who waits


class CacheSalts:
    """Salts of SGLang's prefix cache: what some weights have read serves requests of their version alone, and the rest
    of responses that they began, until `max_age` versions later."""

    def __init__(self, max_age: int) -> None:
        self._max_age = max_age
        self._began: dict[int, int] = {}  # by seed: the version that began a response

    def of(self, request: Request, version: int) -> str:
        """Return the salt of a request that weights of this version sample."""
        began = self._began.get(request.seed, version) if request.response_ids else version
        if version - began > self._max_age:
            began = version
        self._began[request.seed] = began
        return str(began)

    def forget(self, version: int) -> None:
        """Forget responses that are too old for weights of this version."""
        self._began = {seed: began for seed, began in self._began.items() if version - began <= self._max_age}


class SGLangEngine(RolloutEngine):
    """One SGLang engine for each engine mesh; the mesh's first rank has the processes behind it."""

    facts = ENGINES["sglang"][1]
    naming: Naming = "checkpoint"

    def __init__(
        self,
        options: SGLangOptions,
        mesh: DeviceMesh,
        *,
        model_config: Any,
        transport: Transport,
        images: ImageStore | None = None,
    ) -> None:
        """Start the engine, and return on every rank of the mesh when it is ready. `images` holds the pixels of the
        images in requests. Raises EngineDied on the first rank when it did not start."""
        super().__init__(torch.device(mesh.device_type if transport == "cuda_ipc" else "cpu"))
        self.leads = mesh.get_local_rank() == 0
        self._options = options
        self._mesh = mesh
        self._shard = TpShard.of(
            model_config,
            rank=mesh.get_local_rank(),
            size=mesh.size(),
            device_type=mesh.device_type,
            on_policy=options.arguments.get("rl_on_policy_target") is not None,
        )
        self._family, self._images = vision_family(model_config), images
        self._unused = family_of(model_config.get_text_config()).sglang.has_unused
        self._released: set[str] = set()
        self._adapters = AdapterSlots(self._shard)
        self._salts = CacheSalts(options.max_cache_age)
        self._handles: list[tuple[str, sglang_process.Handle]] = []  # of each bucket: its description and its memory
        self._payloads: list[list[bytes]] = []  # of each rank of the mesh, of each bucket
        self._folder = tempfile.TemporaryDirectory(prefix="spmdrl-digests-")
        self._list = Path(self._folder.name, "scales.json")  # the engine's own weights in e4m3
        self._digest_requests = sglang_loader.DigestRequests(Path(tempfile.mkdtemp(dir=self._folder.name)))
        self._expected: dict[str, str] = {}  # digests, of all refits
        self._asked: set[str] = set()  # weights of this refit whose digests are asked for
        self._loading: Future[Any] | None = None
        self._abort = False
        self._is_idle = True
        self._names = itertools.count()
        self._finished: _Finished = queue.SimpleQueue()  # of the `generate` that runs
        self._free_at_start: int | None = None  # bytes of the device, when the engine was first started
        sglang_process.share_tensors(self.device.type)
        with raise_on_all_ranks(mesh):  # the others wait here, on a socket
            self._process = self._start() if self.leads else None

    @classmethod
    def problems(
        cls,
        cfg: Config,
        model_config: Any,
        stop_token_ids: frozenset[int] | None,
        *,
        num_ranks: int,
        device_type: str,
    ) -> Iterator[str]:
        return sglang_problems(cfg, model_config, stop_token_ids, num_ranks=num_ranks, device_type=device_type)

    @classmethod
    def start(cls, run: Launch[Config]) -> RolloutEngine:
        cfg, model_config = run.cfg, run.inputs.model_config
        options = sglang_options(cfg, run.plan, run.world, model_config)
        transport = choose_transport(cfg, model_config, run.device, run.meshes.training, message=run.report.message)
        images = run.inputs.images.store
        return cls(options, run.meshes.engine, model_config=model_config, transport=transport, images=images)

    @classmethod
    def start_receiver(cls, run: Launch[Config]) -> RolloutEngine:
        options = sglang_options(run.cfg, run.plan, run.world, run.inputs.model_config)
        return DisaggregatedSGLangEngine(
            options, run.meshes, model_config=run.inputs.model_config, images=run.inputs.images.store
        )

    @classmethod
    def start_sender(cls, run: Launch[Config]) -> RolloutEngine:
        """Start the proxy on a rank that trains; its digests are of SGLang's layout for each device of an engine."""
        tp_size = run.cfg.rollout.tp_size
        shards = [
            TpShard.of(
                run.inputs.model_config,
                rank=rank,
                size=tp_size,
                device_type=run.device.type,
                on_policy=run.cfg.true_on_policy,
            )
            for rank in range(tp_size)
        ]
        return SendingEngine(
            run.plan,
            run.meshes,
            naming=cls.naming,
            group=sending_group(run.plan, run.meshes),
            digests=lambda whole: [
                {name: sglang_process.sglang_checksum(tensor) for name, tensor in sharded_weights(whole, shard).items()}
                for shard in shards
            ],
            device=run.device,
        )

    def _start(self) -> SGLangProcess:
        options = self._options
        arguments = {**options.arguments, "mem_fraction_static": self._fraction()}
        environment = {**options.environment, sglang_loader.LIST_VARIABLE: str(self._list)}
        process = SGLangProcess(arguments, environment=environment, owner=options.owner)
        if process.longest_tokens < options.longest_tokens:
            process.close()
            # SGLang would cut responses short and say that they reached their length.
            raise UserError(
                f"SGLang has room for sequences of {process.longest_tokens} tokens, but a prompt and its response, or "
                f"a question to the policy as a judge and its answer, may have {options.longest_tokens}; raise "
                "rollout.memory_fraction or rollout.max_kv_tokens, or lower data.max_prompt_tokens and "
                "rollout.max_response_tokens, or the judge's max_question_tokens and max_answer_tokens"
            )
        return process

    def _fraction(self) -> float:
        """Return the fraction of the free device memory that is as many bytes as at the engine's first start.

        An engine that is started again finds less of it free, where the trainer has an optimizer's state by then.
        """
        fraction: float = self._options.arguments["mem_fraction_static"]
        if self._mesh.device_type != "cuda":
            return fraction
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        if self._free_at_start is None:
            self._free_at_start = free
        return min(fraction * self._free_at_start / free, _MAX_FRACTION)

    def generate(self, requests: Iterable[Request | None]) -> Iterator[tuple[int, Response]]:
        """Raise EngineDied, within seconds, when a process of the engine ends."""
        if self._process is None:
            return
        assert self.version >= 0, "the engine has no weights: refit before sampling"
        assert not self._released, f"the engine sleeps, without its {', '.join(self._released)}: wake it first"
        self._abort = self._is_idle = False
        source = RequestQueue(requests)
        finished: _Finished = queue.SimpleQueue()
        self._finished = finished
        self._adapters.none_running()
        running: dict[int, tuple[int, Request]] = {}  # with the version that samples it, by place
        while True:
            for index, request in source.take(0 if self._abort else self._options.max_running - len(running)):
                running[index] = self.version, request
                self._submit(index, request, finished)
            if not running:
                assert self._abort or source.is_empty, "nothing is running, so the caller must have another request"
                return
            if (answered := _first(finished)) is not None:
                index, answer = answered
                version, request = running.pop(index)
                response = _response(answer.result(), request, version if version in self._adapters else None)
                if (routes := self._options.routes) is not None:
                    about = answer.result()["meta_info"]
                    response = replace(response, routes=routes.read(about, request, response))
                self._adapters.end(version)
                if response.finish_reason == "abort" and not self._abort:
                    raise RuntimeError(f"SGLang gave up a request by itself: {answer.result()['meta_info']}")
                yield index, response
            self._process.require_alive()
            source.ask_again()

    def ask_soon(self) -> None:
        self._finished.put(None)

    def _submit(self, index: int, request: Request, finished: _Finished) -> None:
        assert self._process is not None
        token_ids = request.prompt_ids + request.response_ids
        routes = {} if self._options.routes is None else self._options.routes.fields(request)
        salt = {"cache_salt": self._salts.of(request, self.version)} if self._options.max_cache_age else {}
        fields = {**image_fields(request, self._family, self._images), **routes, **salt}
        adapters = self._adapters.begin(self.version)
        answer = self._process.start(
            self._process.generate(token_ids, _sampling_params(request), f"{next(self._names)}", adapters, fields)
        )
        answer.add_done_callback(lambda done: finished.put((index, done)))

    def abort(self) -> None:
        self._abort = True
        if self._process is not None:
            with contextlib.suppress(EngineDied):  # `generate` says so
                self._process.abort_all()

    def sleep(self) -> None:
        self._settle()
        tags = sorted(self._options.release - self._released)
        if self._process is not None and tags:
            self._process.ask("release_memory_occupation", "ReleaseMemoryOccupationReqInput", tags=tags)
        self._released |= self._options.release

    def wake(self) -> None:
        assert self.has_weights, "the engine's weights were released: refit before waking it"
        self._resume(self._released)

    def _settle(self) -> None:
        """Wait until the engine has registered that nothing runs: it delivers the last response a moment before. That
        drops its cache, and only who takes memory from it has to know."""
        if self._process is not None and not self._is_idle and not self._options.max_cache_age:
            self._process.drain(limit_s=SETTLE_LIMIT_S)
        self._is_idle = True

    def _resume(self, tags: set[str]) -> None:
        if self._process is not None and tags:
            self._process.ask("resume_memory_occupation", "ResumeMemoryOccupationReqInput", tags=sorted(tags))
        self._released -= tags

    def allocate(self, num_bytes: int) -> Tensor:
        """Allocate memory that the engine's processes can open."""
        memory = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        if memory.is_cuda:
            return memory
        memory.share_memory_()
        if self._mesh.device_type == "cuda":
            _pin(memory)
        return memory

    def begin_update(self, buckets: Sequence[Bucket], buffers: Sequence[Tensor], *, version: int) -> None:
        """Gather every rank's handles on the rank that leads."""
        with _defer_engine_death():
            self._settle()
            self._resume(self._released & {"weights"})
        self._asked.clear()
        are_known = buckets is self._buckets and buffers is self._buffers
        super().begin_update(buckets, buffers, version=version)
        if not are_known:
            self._handles = [self._handle(number) for number in range(len(buckets))]
        # Made for each refit: a handle to host memory counts how often it was opened, and may be opened once.
        mine = [sglang_process.serialized(*handle) for handle in self._handles]
        self._payloads = gather_objects(self._mesh, mine)
        self._open_update()

    def _open_update(self) -> None:
        """Raise UserError on every rank of the engine where its first refit would send another list of weights in e4m3
        than it has."""
        if self._process is not None:
            with _defer_engine_death():
                self._process.ask("begin_weight_update", "BeginWeightUpdateReqInput", selector="all")
        if self.version < 0:
            with raise_on_all_ranks(self._mesh):
                if self._process is not None and not self._process.is_dead():
                    require_same_list(self._list, self._buckets, self._shard)

    def _handle(self, number: int) -> tuple[str, sglang_process.Handle]:
        bucket, buffer = self._buckets[number], number % len(self._buffers)
        stays_open = self.device.type == self._mesh.device_type
        description = sglang_loader.describe_bucket(
            bucket, buffer=buffer, stays_open=stays_open, request=self._digest_requests.path(number)
        )
        return description, sglang_process.Handle(self._buffers[buffer][: bucket.num_bytes])

    def load(self, number: int) -> None:
        """Let `loader.load_bucket` copy it, in SGLang's processes.

        The last bucket carries the version, and drops the cache of the old weights unless some of it may be used."""
        assert self._loading is None, "wait for the bucket before"
        if self.device.type == "cuda":
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
                    flush_cache=is_last and not self._options.max_cache_age,
                    weight_version=str(self._next_version) if is_last else None,
                )
            )

    def wait(self) -> None:
        if self._process is not None and self._loading is not None:
            with _defer_engine_death():
                self._process.result(self._loading)
            self._loading = None

    def end_update(self) -> None:
        if self._process is not None:
            with _defer_engine_death():
                self._process.ask("end_weight_update", "EndWeightUpdateReqInput")
        super().end_update()
        self._salts.forget(self.version)

    @property
    def has_weights(self) -> bool:
        return self.version >= 0 and (self._options.keeps_weights or "weights" not in self._released)

    def load_adapters(self, adapters: AdapterVersion) -> list[str]:
        """Load a version next to those in use; returns the tensors that differ in the engine, by name."""
        differing: list[str] = []
        with _defer_engine_death():
            if self._process is not None:
                differing = self._adapters.load(self._process, adapters)
        self.version = adapters.version
        return differing

    def digests_of(self, bucket: Bucket, flat: Tensor) -> dict[str, str]:
        """Ask this rank's process for its digests too; it answers when it has loaded the bucket."""
        expected = digests(sharded_parts({entry.name: entry.view(flat) for entry in bucket.flat_entries}, self._shard))
        number = self._buckets.index(bucket)
        self._asked |= expected.keys()
        is_last = number == len(self._buckets) - 1
        left_out = self._expected.keys() - self._asked if is_last else set()
        self._digest_requests.ask(number, [*expected, *left_out])
        return expected

    def differing(self, expected: dict[str, str]) -> list[str]:
        """Compare what each device of the engine holds with what its rank expects."""
        host_barrier(self._mesh)  # the rank that leads has waited for the last bucket
        answers = self._digest_requests.take_answers().items()
        found = {name: digest for name, digest in answers if digest or not name.endswith(self._unused)}
        self._expected |= expected  # what a refit leaves out must stay as it was
        mine = [name for name in self._expected.keys() | found.keys() if self._expected.get(name) != found.get(name)]
        everyones = gather_objects(self._mesh, mine)
        if self._process is None or self._process.is_dead():  # `require_alive` says so
            return []
        return sorted({name for names in everyones for name in names})

    def require_alive(self) -> None:
        if self._process is not None:
            self._process.require_alive()

    def revive(self) -> None:
        """Start the engine's process again if it has died, awake and without weights; its ranks do so together."""
        if not any(gather_objects(self._mesh, self._process is not None and self._process.is_dead())):
            return
        with raise_on_all_ranks(self._mesh):  # the others wait here, on a socket
            if self._process is not None:
                self._process.close()
                self._process = self._start()
        self.version = -1
        self._adapters.clear()
        self._loading, self._is_idle = None, True
        self._released = set()

    def close(self) -> None:
        if self._process is not None:
            self._process.close()
        self._folder.cleanup()


def _defer_engine_death() -> AbstractContextManager[None]:
    """Ignore the engine's death in calls of one rank between collectives of all: `require_alive` reports it."""
    return contextlib.suppress(EngineDied)


def _pin(memory: Tensor) -> None:
    """Let the device copy directly into this memory, until the process ends.

    Where the system does not allow that, copies are slower and synchronous.
    """
    runtime = torch.cuda.cudart()
    if runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0) != runtime.cudaError.success:
        # CUDA keeps an error until it is read: the next kernel would raise this one.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")


def _first(finished: _Finished) -> tuple[int, Future[Any]] | None:
    """Take the request that finished first; None when none does for a while, or the caller may have another one."""
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


def _response(answer: Mapping[str, Any], request: Request, version: int | None) -> Response:
    """Translate an answer; `version` is that of its adapters, and without them SGLang knows it.

    An abort lets each running request have one more pass, and SGLang reports all of them as aborted, also one that this
    pass has ended (0.5.23). Taken for unfinished, such a response would be sampled on behind its stop token; at its
    limit SGLang would be asked for no tokens, and answer with the log-probability of one.
    """
    about = answer["meta_info"]
    logprobs = about["output_token_logprobs"]
    reason: FinishReason = about["finish_reason"]["type"]
    assert reason in ("stop", "length", "abort"), about["finish_reason"]
    token_ids = tuple(answer["output_ids"])
    if reason == "abort" and token_ids and token_ids[-1] in request.stop_token_ids:
        reason = "stop"
    elif reason == "abort" and len(request.response_ids) + len(token_ids) == request.max_response_tokens:
        reason = "length"
    spans = _spans(about) if version is None else [Span(version, len(token_ids))] if token_ids else []
    return Response(
        token_ids=token_ids,
        logprobs=tuple(logprob for logprob, *_ in logprobs),
        finish_reason=reason,
        spans=tuple(spans),
        num_cached=about.get("cached_tokens", 0),
    )


def _spans(about: Mapping[str, Any]) -> Iterator[Span]:
    for span in about.get("weight_versions") or ():
        if span["end"] > span["start"]:  # a request that was aborted while it waited has a span without tokens
            yield Span(int(span["version"]), span["end"] - span["start"])


# SGLang on ranks that do not train: its processes receive buckets themselves, in a group with the trainer.


GROUP_NAME = "spmdrl_weights"
# What norms compute from their weight, which has a checksum of its own; scales of keys and values, which are 1.
_NOT_SENT = (".gemma_weight", ".attn.k_scale", ".attn.v_scale")


def backend_for(device_type: str) -> str:
    """Name the backend of torch.distributed that carries buckets."""
    return "nccl" if device_type == "cuda" else "gloo"


class DisaggregatedSGLangEngine(SGLangEngine):
    """An `SGLangEngine` whose `load` lets its processes receive the bucket by broadcast."""

    def __init__(self, options: SGLangOptions, meshes: Meshes, *, model_config: Any, images: ImageStore | None) -> None:
        """Start the engine, then join the group for weights: the sender is its rank 0, and every engine's devices
        follow in order."""
        super().__init__(options, meshes.engine, model_config=model_config, transport="shared_memory", images=images)
        address, port = Link(meshes.world, ORDERS).receive(source=FIRST)
        if self._process is not None:
            self._process.ask(
                "init_weights_update_group",
                "InitWeightsUpdateGroupReqInput",
                master_address=address,
                master_port=port,
                rank_offset=1 + meshes.engine_index * meshes.engine.size(),
                world_size=1 + meshes.engines.size(),
                group_name=GROUP_NAME,
                backend=backend_for(meshes.engine.device_type),
            )

    def begin_update(self, buckets: Sequence[Bucket], buffers: Sequence[Tensor], *, version: int) -> None:
        self._settle()
        self._buckets, self._next_version = buckets, version
        self._open_update()

    def load(self, number: int) -> None:
        """Let `loader.load_bucket` copy it, in SGLang's processes.

        The last bucket carries the version, and drops the cache of the old weights unless some of it may be used."""
        assert self._loading is None, "wait for the bucket before"
        is_last = number == len(self._buckets) - 1
        entries = self._buckets[number].flat_entries
        if self._process is not None:
            self._loading = self._process.start(
                self._process.asking(
                    "update_weights_from_distributed",
                    "UpdateWeightsFromDistributedReqInput",
                    names=[entry.name for entry in entries],
                    dtypes=[str(entry.dtype).removeprefix("torch.") for entry in entries],
                    shapes=[list(entry.shape) for entry in entries],
                    group_name=GROUP_NAME,
                    load_format="flattened_bucket",  # one flat tensor: the entries end to end, as a bucket has them
                    flush_cache=is_last and not self._options.max_cache_age,
                    weight_version=str(self._next_version) if is_last else None,
                )
            )

    def differing(self, expected: dict[str, str]) -> list[str]:
        """Compare SGLang's own checksums of what each device of the engine holds with what its rank expects."""
        self._expected |= expected  # what a refit leaves out must stay as it was
        expectations = gather_objects(self._mesh, self._expected)
        if self._process is None:
            return []
        try:
            _, _, ranks, _ = self._process.ask("check_weights", "CheckWeightsReqInput", action="checksum")
        except EngineDied:  # `require_alive` says so
            return []
        checksums = {info["parallelism_info"][0]["tp_rank"]: info["checksums"] for info in ranks}
        return sorted(
            name
            for rank, expectation in enumerate(expectations)
            for name in expectation.keys() | checksums[rank].keys()
            if expectation.get(name) != checksums[rank].get(name) and not name.endswith(_NOT_SENT)
        )


class SendingEngine(RemoteEngine):
    """A `RemoteEngine` whose group has processes that are no ranks of the run."""

    def close(self) -> None:
        """Leave the group. Its other processes are killed, and the usual end of an NCCL group waits for them."""
        if self._group is not None and dist.get_backend(self._group) == "nccl":
            self._group.abort()


def sending_group(plan: Plan, meshes: Meshes) -> dist.ProcessGroup | None:
    """Make the group in which engines receive weights, and wait until all have joined. None on ranks that do not
    send."""
    link = Link(meshes.world, ORDERS, in_flight=1)
    if meshes.training.get_local_rank() != 0:
        return None
    one_machine = os.environ.get("LOCAL_WORLD_SIZE", "1") == str(plan.num_ranks)
    address = "127.0.0.1" if one_machine else os.environ["MASTER_ADDR"]  # torchrun's: that of its first machine
    store = listening_store("127.0.0.1" if one_machine else "", address)
    for rank in range(plan.training_ranks, plan.num_ranks):
        link.send((address, store.port), to=rank)
    group = sglang_process.update_group(
        store, GROUP_NAME, num_ranks=1 + plan.engine_ranks, backend=backend_for(meshes.training.device_type)
    )
    link.settle()
    return group
