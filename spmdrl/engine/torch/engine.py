"""The torch engine: continuous batching on the transformers model itself, in the process of its rank.

    TorchEngine    here           weights and adapters that refits replace, and the loop of `generate`
    Scheduler      scheduler.py   requests that wait, run and have finished; the prefix cache
    ModelRunner    runner.py      prefill, extend and decode, one token for each running request
    RowCache       cache.py       keys, values and recurrent states, a row for each running request
    RowSampling    sampling.py    temperature, top-p and noise of each row
    AdapterBank    adapters.py    LoRA adapters of several versions, each row with those of its request
    ImageFeatures  cache.py       what the model's tower makes of images

It starts in a second and runs wherever torch does. Other engines are tested against it.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers.initialization import no_init_weights

from spmdrl.config import Config
from spmdrl.config.engines import ENGINES
from spmdrl.data.image_store import ImageStore
from spmdrl.engine.protocol import AdapterRefs, RolloutEngine
from spmdrl.engine.remote import RemoteEngine
from spmdrl.engine.torch.cache import bytes_per_token
from spmdrl.engine.torch.runner import ModelRunner
from spmdrl.engine.torch.scheduler import ASK_AGAIN_TOKENS, CachedPrefix, PrefixCache, RequestState, Scheduler
from spmdrl.model.attention import Kernel
from spmdrl.model.fp8 import SCALES, as_numbers
from spmdrl.model.layers import replace_layers
from spmdrl.model.load import weights_of
from spmdrl.model.operators import operators_of
from spmdrl.model.rotary import changes_after, changes_between
from spmdrl.model.trunk import attention_of, model_class
from spmdrl.refit.bucket import AdapterVersion, Bucket
from spmdrl.refit.digest import digest, digests
from spmdrl.refit.gather import copy_all
from spmdrl.run import Launch
from spmdrl.types import Request, Response, UserError


class TorchEngine(RolloutEngine):
    """An engine in this process, with a whole copy of the model on one device."""

    facts = ENGINES["torch"][1]

    def __init__(
        self,
        model_config: Any,
        *,
        device: torch.device,
        dtype: torch.dtype,
        kernel: Kernel,
        max_running: int,
        release: Collection[str] = ("kv_cache",),
        images: ImageStore | None = None,
        max_patches: int = 16384,
        max_cached_tokens: int = 2**16,
        records_routes: bool = False,
        max_cache_age: int = 0,
    ):
        """`release` lists what `sleep` gives back: "kv_cache", "weights" or both. `images` holds the pixels of the
        images in requests, of which the model's tower encodes `max_patches` in one pass. Besides the rows of running
        requests the engine caches those of finished ones, in at most as much memory as the keys and values of
        `max_cached_tokens` tokens take. Requests may ask for routes where these are recorded. The rest of an aborted
        response continues from the row of its beginning where `max_cache_age` versions allow that."""
        own_config = copy.deepcopy(model_config)  # building a model writes into its config
        with torch.device(device), no_init_weights():
            model = model_class(own_config).from_config(
                own_config, dtype=dtype, attn_implementation=attention_of(own_config)
            )
        replace_layers(model, operators_of(kernel), device_type=device.type)
        model.tie_weights()
        super().__init__(model.device)
        self.model = model.eval().requires_grad_(False)
        self.runner = ModelRunner(
            model,
            kernel=kernel,
            max_running=max_running,
            images=images,
            max_patches=max_patches,
            records_routes=records_routes,
        )
        self._max_running = max_running
        self._release = frozenset(release)
        self._max_cached_bytes = max_cached_tokens * bytes_per_token(model.config.get_text_config(), dtype)
        self.weights = weights_of(self.model)
        storages = [weight.untyped_storage() for weight in self.weights.values()]
        # Tied weights share one, and so do those that the decoder has put side by side.
        self._storages = [(storage, storage.nbytes()) for storage in {one._cdata: one for one in storages}.values()]
        self._missing: set[str] = set(self.weights)
        self._max_cache_age = max_cache_age
        self._forget_prefixes()
        self._expected: dict[str, str] = {}  # digests, of all refits
        self._adapter_refs = AdapterRefs()
        self._is_aborted = self._asks_soon = False

    @classmethod
    def problems(cls, cfg: Config, model_config: Any, *_: Any, **__: Any) -> Iterator[str]:
        return iter(())  # a model that attends twice in a layer is refused when it does

    @classmethod
    def start(cls, run: Launch[Config]) -> RolloutEngine:
        return cls(run.inputs.model_config, **_settings(run), release=run.cfg.offload.engine)

    @classmethod
    def start_receiver(cls, run: Launch[Config]) -> RolloutEngine:
        assert run.meshes.weights is not None
        return DisaggregatedTorchEngine(run.inputs.model_config, run.meshes.weights, **_settings(run))

    @classmethod
    def start_sender(cls, run: Launch[Config]) -> RolloutEngine:
        """Start the proxy on a rank that trains; its digests are those of weights in the compute dtype."""
        weights = run.meshes.weights
        return RemoteEngine(
            run.plan,
            run.meshes,
            naming=cls.naming,
            group=None if weights is None else weights.get_group(),
            digests=lambda whole: [_digests(whole, run.dtype)],
            device=run.device,
        )

    def generate(self, requests: Iterable[Request | None]) -> Iterator[tuple[int, Response]]:
        """Requests of the same prompt that wait together share its prefill."""
        assert not self._missing, f"the engine has no weights for {min(self._missing)}: refit before sampling"
        self._is_aborted = False
        self._adapter_refs.none_running()
        if not self._max_cache_age:
            self._forget_prefixes()
        runner, prefix_cache = self.runner, self._prefix_cache
        runner.reset()

        def start(index: int, request: Request) -> RequestState:
            return self._start_request(index, request, prefix_cache)

        scheduler = Scheduler(requests, max_running=self._max_running, start=start)
        while True:
            if self._is_aborted:
                if self._max_cache_age:
                    self._store_prefixes(scheduler.running, range(len(scheduler.running)))
                unfinished = [*scheduler.running, *scheduler.waiting]
                self._release_adapters(unfinished)
                yield from ((state.index, state.response()) for state in unfinished)
                return
            if admitted := scheduler.schedule(runner.num_decodes):
                sampled = runner.prefill(admitted, scheduler.running, num_waiting=len(scheduler.waiting))
                has_finished = scheduler.postprocess(admitted, *sampled)
                runner.begin_decoding(scheduler.running)
            elif scheduler.running:
                has_finished = scheduler.postprocess(scheduler.running, *runner.decode(scheduler.running))
                if runner.num_decodes % ASK_AGAIN_TOKENS == 0 or self._asks_soon:
                    self._asks_soon = False
                    scheduler.ask_again()
            else:
                assert scheduler.is_done, "nothing is running, so the caller must have another request or none at all"
                return
            if has_finished:
                self._store_prefixes(scheduler.running, _followed(scheduler.running))
                finished, rows = scheduler.remove_finished()
                runner.compact(rows)
                self._release_adapters(finished)
                yield from ((state.index, state.response()) for state in finished)
                scheduler.ask_again()
            if self.clock is not None and self.clock.advance():
                self._is_aborted = True

    def _start_request(self, index: int, request: Request, prefix_cache: PrefixCache) -> RequestState:
        """Start a request on the newest weights, after its longest cached prefix."""
        # Read now: to make the request the caller may have loaded a newer version.
        state = RequestState(index, request, self.version)
        self._adapter_refs.begin(state.version)
        self._refuse_other_frequencies(request)
        state.cached = prefix_cache.find(state.prefix, continues=bool(request.response_ids))
        if state.cached is not None and changes_between(
            self.model.config, len(state.cached.prefix.token_ids), len(state.prefix.token_ids)
        ):
            state.cached = None  # its keys have the rotary frequencies of a shorter sequence
        if state.cached is None:
            self.runner.images.take(request.images)
        else:
            state.oldest_version = state.cached.oldest_version
        return state

    def _refuse_other_frequencies(self, request: Request) -> None:
        """Raise UserError where the rotary frequencies of the cache's keys would change as a response grows."""
        num_tokens, config = len(request.prompt_ids), self.model.config
        if changes_between(config, num_tokens, num_tokens + request.max_response_tokens):
            raise UserError(
                f"a prompt of {num_tokens} tokens and a response of up to {request.max_response_tokens} would have "
                f"other rotary frequencies in the end than in the beginning ({config.model_type}: beyond "
                f"{changes_after(config)} tokens); lower max_response_tokens"
            )

    def _forget_prefixes(self) -> None:
        self._prefix_cache = PrefixCache(self._max_cached_bytes, max_age=self._max_cache_age)

    def _store_prefixes(self, running: Sequence[RequestState], rows: Iterable[int]) -> None:
        """Store some rows of the cache that later requests may continue."""
        for row in rows:
            state, cache = running[row], self.runner.cache
            assert cache is not None
            if state.version == self.version and self._prefix_cache.make_room(cache.row_bytes(row)):
                routes = torch.cat(state.routes) if state.routes else None
                prefix, contents = state.row_prefix, cache.contents(row)
                self._prefix_cache.store(CachedPrefix(prefix, contents, state.oldest_version, routes))

    def _release_adapters(self, finished: Sequence[RequestState]) -> None:
        """Free the adapters that only these requests needed."""
        for state in finished:
            self._adapter_refs.end(state.version)
        self._drop_unused_adapters()

    def _drop_unused_adapters(self) -> None:
        for version in self._adapter_refs.pop_unused(self.version):
            self.runner.adapters.drop(version)

    def abort(self) -> None:
        self._is_aborted = True

    def ask_soon(self) -> None:
        self._asks_soon = True

    def sleep(self) -> None:
        """Return the memory to the device, not only to torch's allocator: training would otherwise allocate parts of
        it, and the next cache would not fit."""
        self.runner.images.clear()
        if "kv_cache" in self._release:
            self.runner.cache = None
            self._forget_prefixes()
        if "weights" in self._release:
            self._missing = set(self.weights)
            for storage, _ in self._storages:
                storage.resize_(0)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()

    def begin_update(self, buckets: Sequence[Bucket], buffers: Sequence[Tensor], *, version: int) -> None:
        super().begin_update(buckets, buffers, version=version)
        self._missing |= {entry.name.removesuffix(SCALES) for bucket in buckets for entry in bucket.flat_entries}
        for storage, num_bytes in self._storages:
            storage.resize_(num_bytes)

    @torch.no_grad()
    def load(self, number: int) -> None:
        # There is nothing to wait for: what follows on this device comes after the copy.
        tensors = as_numbers(dict(self.tensors(number)), self.model.dtype)
        copy_all([self.weights[name] for name in tensors], list(tensors.values()))
        self._missing -= tensors.keys()

    def end_update(self) -> None:
        if self._missing:
            raise RuntimeError(
                f"refit to version {self._next_version} left {len(self._missing)} weights out: {min(self._missing)}"
            )
        super().end_update()

    @property
    def has_weights(self) -> bool:
        return not self._missing

    def load_adapters(self, adapters: AdapterVersion) -> list[str]:
        """Copy a version next to those in use; returns the tensors that differ from what was sent, by name."""
        copies = self.runner.adapters.load(adapters)
        self.version = adapters.version
        self._adapter_refs.add(adapters.version)
        self._drop_unused_adapters()
        if digest(copies.flat) == digest(adapters.flat):
            return []
        given, found = (digests({name: [x] for name, x in one.tensors.items()}) for one in (adapters, copies))
        return [name for name in given if given[name] != found[name]]

    def digests_of(self, bucket: Bucket, flat: Tensor) -> dict[str, str]:
        return _digests({entry.name: entry.view(flat) for entry in bucket.flat_entries}, self.model.dtype)

    def differing(self, expected: dict[str, str]) -> list[str]:
        self._expected |= expected  # what a refit leaves out must stay as it was
        found_digests = digests({name: [tensor] for name, tensor in self.weights.items()})
        return [name for name, found in found_digests.items() if found != self._expected.get(name)]

    def close(self) -> None:
        self.runner.images.clear()
        self.runner.cache = None


def _followed(running: Sequence[RequestState]) -> list[int]:
    """The rows of finished requests that another one may follow."""
    return [row for row, state in enumerate(running) if state.finish_reason in state.request.cache_on_finish]


def _digests(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, str]:
    """Digest what the engine must hold after loading these tensors of a bucket."""
    return digests({name: [tensor] for name, tensor in as_numbers(tensors, dtype).items()})


def _settings(run: Launch[Config]) -> dict[str, Any]:
    return {
        "device": run.device,
        "dtype": run.dtype,
        "kernel": run.kernel,
        "max_running": run.cfg.rollout.max_running,
        "images": run.inputs.images.store,
        "max_patches": run.cfg.pack.max_patches_per_pass,
        "max_cached_tokens": min(run.cfg.rollout.max_running, run.plan.rollouts_per_engine_rank)
        * run.plan.max_sequence_tokens,
        "records_routes": run.cfg.correction.router_replay == "R3",
        "max_cache_age": run.cfg.rollout.max_cache_age,
    }


class DisaggregatedTorchEngine(TorchEngine):
    """A `TorchEngine` on a rank that does not train: `load` receives the bucket first, into memory of its own."""

    def __init__(self, model_config: Any, weights: DeviceMesh, **settings: Any) -> None:
        """`weights` holds the sending rank first, then all that receive; `settings` go to `TorchEngine`."""
        super().__init__(model_config, **settings)
        self._group = weights.get_group()
        self._sender = int(weights.mesh[0])
        self._receive_buffer: Tensor | None = None

    def begin_update(self, buckets: Sequence[Bucket], buffers: Sequence[Tensor], *, version: int) -> None:
        largest = max(bucket.num_bytes for bucket in buckets)
        if self._receive_buffer is None or self._receive_buffer.numel() < largest:
            self._receive_buffer = self.allocate(largest)
        super().begin_update(buckets, [self._receive_buffer], version=version)

    def load(self, number: int) -> None:
        assert self._receive_buffer is not None
        received = self._receive_buffer[: self._buckets[number].num_bytes]
        dist.broadcast(received, src=self._sender, group=self._group)
        super().load(number)
