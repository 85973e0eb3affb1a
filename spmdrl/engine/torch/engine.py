"""The embedded engine: continuous batching, with a cache for every row, on the transformers model itself.

On a rank that does not train, its subclass receives each bucket by broadcast.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers.initialization import no_init_weights

from spmdrl.config import Config
from spmdrl.config.engines import ENGINES
from spmdrl.data.image_store import ImageStore
from spmdrl.engine.dense_decoder import DenseDecoder, can_decode
from spmdrl.engine.protocol import RequestQueue, RolloutEngine
from spmdrl.engine.remote import RemoteEngine
from spmdrl.engine.torch.adapters import AdapterBank
from spmdrl.engine.torch.cache import (
    AttendToCache,
    KeptRow,
    PrefixCache,
    RowCache,
    attend_to_cache,
    bytes_per_token,
    cannot_sample,
)
from spmdrl.engine.torch.images import ImageFeatures
from spmdrl.engine.torch.requests import Running, admit
from spmdrl.engine.torch.sampling import (
    NOISE_PLACES,
    RowSampling,
    SampleTokens,
    sample_tokens,
    sample_with_head_logprobs,
)
from spmdrl.engine.versions import AdapterRefs
from spmdrl.model.attention import Kernel, packed_attention
from spmdrl.model.exact import invariant
from spmdrl.model.exact.invariant import attend_to_cache_in_tiles
from spmdrl.model.load import persistent_buffers
from spmdrl.model.operators import operators_of
from spmdrl.model.policy import packed_positions, position_shift
from spmdrl.model.recurrent import reset_state_per_sequence
from spmdrl.model.rotary import changes_after, changes_between
from spmdrl.model.trunk import Trunk, attention_of, model_class
from spmdrl.refit.bucket import Bucket
from spmdrl.refit.digest import digest, digests
from spmdrl.refit.gather import copy_all
from spmdrl.refit.sink import AdapterVersion
from spmdrl.run import Launch
from spmdrl.types import FinishReason, Request, Response, Span, UserError

# The embedded engine: continuous batching, with a cache for every row, on the transformers model itself.
#
# It starts in a second and runs wherever torch does. Other engines are tested against it.


ASK_AGAIN_TOKENS = 16  # of each row, after which a caller that had nothing to start is asked again
READ_AFTER_TOKENS = 4  # of each row, so that requests that come one by one are read together


def model_problems(model_config: Any) -> Iterator[str]:
    """Yield a sentence when this engine cannot sample from such a model."""
    text = model_config.get_text_config()
    if getattr(text, "kv_lora_rank", None) or getattr(text, "global_head_dim", None):
        yield cannot_sample(model_config, "all of one size, and this model has several sizes")


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
        max_kept_tokens: int = 2**16,
    ):
        """`release` lists what `sleep` gives back: "kv_cache", "weights" or both. `images` holds the pixels of the
        images in requests, of which the model's tower looks at `max_patches` in one pass. Besides the rows of running
        requests the engine keeps those of ended ones that may go on, of at most as much memory as the keys and values
        of `max_kept_tokens` tokens take. Raises UserError when it cannot sample from such a model."""
        for problem in model_problems(model_config):
            raise UserError(problem)
        own_config = copy.deepcopy(model_config)  # building a model writes into its config
        with torch.device(device), no_init_weights():
            model = model_class(own_config).from_config(
                own_config, dtype=dtype, attn_implementation=attention_of(own_config)
            )
        operators_of(kernel).install(model)
        reset_state_per_sequence(model)
        model.tie_weights()
        super().__init__(model.device)
        self.model = model.eval().requires_grad_(False)
        self._trunk = Trunk(model)
        self._features = ImageFeatures(self._trunk, images, max_patches=max_patches)
        self._adapters = AdapterBank(model, operators_of(kernel).linear)
        self._decoder = DenseDecoder(model, self._adapters) if kernel == "sdpa" and can_decode(model) else None
        self._kernel: Kernel = kernel
        self.attend_to_cache, self._sample_tokens = _decoding_of(kernel)
        self._max_running = max_running
        self._release = frozenset(release)
        self._cache: RowCache | None = None
        text = self.model.config.get_text_config()
        self._max_kept_bytes = max_kept_tokens * bytes_per_token(text, dtype)
        self.weights = dict(self.model.named_parameters()) | persistent_buffers(self.model)
        storages = [weight.untyped_storage() for weight in self.weights.values()]
        # Tied weights share one, and so do those that the decoder has put side by side.
        self._storages = [(storage, storage.nbytes()) for storage in {one._cdata: one for one in storages}.values()]
        self._missing: set[str] = set(self.weights)
        self._expected: dict[str, str] = {}  # digests, of all refits
        self._versions = AdapterRefs()
        self._abort = self._asks = False

    @classmethod
    def problems(cls, cfg: Config, model_config: Any, *_: Any, **__: Any) -> Iterator[str]:
        yield from model_problems(model_config)

    @classmethod
    def start(cls, run: Launch[Config]) -> RolloutEngine:
        return cls(run.inputs.model_config, **_settings(run), release=run.cfg.offload.engine)

    @classmethod
    def start_receiver(cls, run: Launch[Config]) -> RolloutEngine:

        assert run.meshes.weights is not None
        return DisaggregatedTorchEngine(run.inputs.model_config, run.meshes.weights, **_settings(run))

    @classmethod
    def start_sender(cls, run: Launch[Config]) -> RolloutEngine:
        weights = run.meshes.weights
        return RemoteEngine(
            run.plan,
            run.meshes,
            naming=cls.naming,
            group=None if weights is None else weights.get_group(),
            digests=lambda whole: [digests({name: [tensor] for name, tensor in whole.items()})],
            device=run.device,
        )

    def generate(self, requests: Iterable[Request | None]) -> Iterator[tuple[int, Response]]:
        """Requests of the same prompt that wait together share its prefill."""
        assert not self._missing, f"the engine has no weights for {min(self._missing)}: refit before sampling"
        self._abort = False
        self._versions.none_running()
        # No bit of an answer depends on what was looked at or read by an earlier call.
        self._features.clear()
        kept = PrefixCache(self._max_kept_bytes)
        source = RequestQueue(requests)
        waiting: deque[Running] = deque()
        rows: list[Running] = []
        is_reading = False  # those that wait are due, until all of them have rows
        sampling = self._sampling(rows)
        ahead = 0  # decode steps since the noise in `sampling` was made
        last = torch.empty(0, dtype=torch.int64, device=self.device)
        while True:
            if self._abort:
                self._end([*rows, *waiting])
                yield from ((run.index, self._response(run, "abort")) for run in (*rows, *waiting))
                return
            waiting.extend(self._taken(source, kept, self._max_running - len(rows) - len(waiting)))
            is_reading = bool(waiting) and (is_reading or ahead >= READ_AFTER_TOKENS or len(waiting) >= len(rows))
            if is_reading and len(rows) < self._max_running:
                admitted = admit(waiting, self._max_running - len(rows))
                self._reserve([*rows, *admitted], num_rows=len(rows) + len(admitted) + len(waiting))
                logits = self._prefill(admitted, first_row=len(rows))
                last = self._append(admitted, self._sample_tokens(logits, self._sampling(admitted), 0), last)
                rows += admitted
                sampling, ahead = self._sampling(rows), 0
            elif rows:
                if ahead == NOISE_PLACES:
                    sampling, ahead = sampling.at([run.num_sampled for run in rows]), 0
                self._adapters.choose((run.version, 1) for run in rows)
                last = self._append(rows, self._sample_tokens(self._decode(last), sampling, ahead), last[:0])
                ahead += 1
                if ahead % ASK_AGAIN_TOKENS == 0 or self._asks:
                    self._asks = False
                    source.ask_again()
            else:
                assert source.is_empty, "nothing is running, so the caller must have another request or none at all"
                return
            reasons = [run.finish_reason() for run in rows]
            if any(reasons):
                for row, (run, why) in enumerate(zip(rows, reasons, strict=True)):
                    if why in run.request.cache_on_finish:
                        self._keep(kept, row, run)
                unfinished = self._compact([why is None for why in reasons])
                finished = [(run, why) for run, why in zip(rows, reasons, strict=True) if why]
                rows = [rows[row] for row in unfinished]
                self._end([run for run, _ in finished])
                order = torch.tensor(unfinished, dtype=torch.int64, device=self.device)
                sampling, last = sampling.take(order), last[order]
                yield from ((run.index, self._response(run, why)) for run, why in finished)
                source.ask_again()

    def _taken(self, source: RequestQueue, kept: PrefixCache, num_free: int) -> Iterator[Running]:
        for index, request in source.take(num_free):
            # Read now: to make the request the caller may have loaded a newer version.
            self._versions.begin(self.version)
            self._refuse_other_frequencies(request)
            run = Running(index, request, self.version)
            run.begun = kept.take(run.context)
            if run.begun is not None and changes_between(
                self.model.config, len(run.begun.context.token_ids), len(run.context.token_ids)
            ):
                run.begun = None  # its keys have the rotary frequencies of a shorter sequence
            if run.begun is None:
                self._features.take(request.images)
            yield run

    def _refuse_other_frequencies(self, request: Request) -> None:
        """Raise UserError where the rotary frequencies of the cache's keys would change as a response grows."""
        num_read, config = len(request.prompt_ids), self.model.config
        if changes_between(config, num_read, num_read + request.max_response_tokens):
            raise UserError(
                f"a prompt of {num_read} tokens and a response of up to {request.max_response_tokens} would have other "
                f"rotary frequencies in the end than in the beginning ({config.model_type}: beyond "
                f"{changes_after(config)} tokens); lower max_response_tokens"
            )

    def _keep(self, kept: PrefixCache, row: int, run: Running) -> None:
        """Keep the row of a request that another one may follow."""
        assert self._cache is not None
        if run.version == self.version and kept.make_room(self._cache.row_bytes(row)):
            kept.keep(KeptRow(run.read, self._cache.contents(row)))

    def _end(self, runs: Sequence[Running]) -> None:
        """Free the adapters that only these runs needed."""
        for run in runs:
            self._versions.end(run.version)
        self._drop_dead()

    def _drop_dead(self) -> None:
        for version in self._versions.pop_unused(self.version):
            self._adapters.drop(version)

    def abort(self) -> None:
        self._abort = True

    def wake_up(self) -> None:
        self._asks = True

    def sleep(self) -> None:
        """Return the memory to the device, not only to torch's allocator: training would otherwise allocate parts of
        it, and the next cache would not fit."""
        self._features.clear()
        if "kv_cache" in self._release:
            self._cache = None
        if "weights" in self._release:
            self._missing = set(self.weights)
            for storage, _ in self._storages:
                storage.resize_(0)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()

    def begin_update(self, buckets: Sequence[Bucket], buffers: Sequence[Tensor], *, version: int) -> None:
        super().begin_update(buckets, buffers, version=version)
        self._missing |= {entry.name for bucket in buckets for entry in bucket.flat_entries}
        for storage, num_bytes in self._storages:
            storage.resize_(num_bytes)

    @torch.no_grad()
    def load(self, number: int) -> None:
        # There is nothing to wait for: what follows on this device comes after the copy.
        tensors = dict(self.tensors(number))
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
        held = self._adapters.load(adapters)
        self.version = adapters.version
        self._versions.hold(adapters.version)
        self._drop_dead()
        if digest(held.flat) == digest(adapters.flat):
            return []
        given, found = (digests({name: [x] for name, x in one.tensors.items()}) for one in (adapters, held))
        return [name for name in given if given[name] != found[name]]

    def digests_of(self, bucket: Bucket, flat: Tensor) -> dict[str, str]:
        return digests({entry.name: [entry.view(flat)] for entry in bucket.flat_entries})

    def differing(self, expected: dict[str, str]) -> list[str]:
        self._expected |= expected  # what a refit leaves out must stay as it was
        held = digests({name: [tensor] for name, tensor in self.weights.items()})
        return [name for name, found in held.items() if found != self._expected.get(name)]

    def close(self) -> None:
        self._features.clear()
        self._cache = None

    def _reserve(self, runs: Sequence[Running], *, num_rows: int) -> None:
        """Make the cache large enough for these runs, and for `num_rows` rows if so many may run."""
        longest = max(len(run.request.prompt_ids) + run.request.max_response_tokens for run in runs)
        if self._cache is None:
            config = self.model.config.get_text_config()
            self._cache = RowCache(config, num_rows, longest, device=self.device, dtype=self.model.dtype)
        elif not self._cache.holds(len(runs), longest):
            self._cache.grow(min(num_rows, self._max_running), longest)

    @torch.inference_mode()
    def _prefill(self, runs: list[Running], *, first_row: int) -> Tensor:
        """Fill rows first_row... of the cache; return the logits of each run's first response token, [n, V]."""
        if runs[0].begun is None:
            return self._read(runs, first_row=first_row)
        return self._read_on(runs, first_row=first_row)

    def _read_on(self, runs: list[Running], *, first_row: int) -> Tensor:
        """Read what follows on the contexts of earlier requests."""
        begun = [run.begun.contents for run in runs if run.begun is not None]
        unread = [run.unread for run in runs]
        seqlens = [len(token_ids) for token_ids in unread]
        self._adapters.choose(zip((run.version for run in runs), seqlens, strict=True))
        assert self._cache is not None
        inputs, rest, positions = self._cache.begin_rest(
            begun,
            seqlens=seqlens,
            shifts=[position_shift(run.request.images, family=self._trunk.family) for run in runs],
            kernel=self._kernel,
            first_row=first_row,
        )
        for run in runs:
            run.begun = None  # its row has it now
        token_ids = torch.tensor([token for one in unread for token in one], device=self.device)
        last_ones = torch.tensor(seqlens, device=self.device).cumsum(0) - 1
        if self._decoder is not None:
            return self._decoder(token_ids, positions, self._cache.longest, rest, last_ones)
        return self._head(self._trunk(token_ids, positions, **inputs)[last_ones])

    def _read(self, runs: list[Running], *, first_row: int) -> Tensor:
        """Read contexts from their beginnings, each once."""
        contexts = sorted({run.context for run in runs}, key=lambda context: context.order)
        place = {context: i for i, context in enumerate(contexts)}
        sequences = [place[run.context] for run in runs]
        seqlens = [len(context.token_ids) for context in contexts]
        starts = [0, *itertools.accumulate(seqlens)]
        images = [image.moved(start) for start, one in zip(starts, contexts, strict=False) for image in one.images]
        self._adapters.choose((context.version, len(context.token_ids)) for context in contexts)
        features = self._features.placed(images)
        cu_seqlens = torch.tensor(starts, dtype=torch.int32, device=self.device)
        assert self._cache is not None
        inputs = self._cache.begin_prefill(
            packed_attention(cu_seqlens, seqlens, self._kernel, blocks=self._trunk.seen_whole(images)),
            seqlens=seqlens,
            shifts=[position_shift(context.images, family=self._trunk.family) for context in contexts],
            sequences=sequences,
            first_row=first_row,
        )
        hidden = self._trunk(
            torch.tensor([token for context in contexts for token in context.token_ids], device=self.device),
            packed_positions(seqlens, images, family=self._trunk.family).to(self.device),
            images=features,
            **inputs,
        )
        logits = self._head(hidden[cu_seqlens[1:] - 1])
        return logits[torch.tensor(sequences, device=self.device)]

    @torch.inference_mode()
    def _decode(self, last: Tensor) -> Tensor:
        """Compute the logits [n, V] of the token after `last` [n] int64 in every row."""
        assert self._cache is not None
        inputs, newest, positions = self._cache.begin_decode(self.attend_to_cache)
        if self._decoder is not None:
            return self._decoder(last, positions, self._cache.longest, newest)
        return self._head(self._trunk(last, positions, **inputs))

    def _head(self, hidden: Tensor) -> Tensor:
        """Map hidden states [n, D] to logits [n, V]."""
        logits: Tensor = self.model.get_output_embeddings()(hidden)
        return logits

    def _compact(self, unfinished: list[bool]) -> list[int]:
        """Keep the unfinished rows as rows 0, 1, ..., filling holes from the end; return the old row of each."""
        assert self._cache is not None
        num_kept = sum(unfinished)
        kept = list(range(num_kept))
        holes = [row for row in range(num_kept) if not unfinished[row]]
        movers = [row for row in range(num_kept, len(unfinished)) if unfinished[row]]
        for hole, mover in zip(holes, movers, strict=True):
            kept[hole] = mover
        self._cache.compact(kept, holes, movers)
        return kept

    def _sampling(self, runs: list[Running]) -> RowSampling:
        places = [run.num_sampled for run in runs]
        return RowSampling.of([run.request for run in runs], places, self.device)

    def _append(self, runs: list[Running], sampled: tuple[Tensor, Tensor], last: Tensor) -> Tensor:
        tokens, logprobs = sampled
        for run, token, logprob in zip(runs, tokens.tolist(), logprobs.tolist(), strict=True):
            run.token_ids.append(token)
            run.logprobs.append(logprob)
        return torch.cat([last, tokens]) if len(last) else tokens

    def _response(self, run: Running, reason: FinishReason) -> Response:
        return Response(
            token_ids=tuple(run.token_ids),
            logprobs=tuple(run.logprobs),
            finish_reason=reason,
            spans=(Span(run.version, len(run.token_ids)),) if run.token_ids else (),
        )


def _settings(run: Launch[Config]) -> dict[str, Any]:
    return {
        "device": run.device,
        "dtype": run.dtype,
        "kernel": run.kernel,
        "max_running": run.cfg.rollout.max_running,
        "images": run.inputs.images.store,
        "max_patches": run.cfg.pack.max_patches_per_pass,
        "max_kept_tokens": min(run.cfg.rollout.max_running, run.plan.rollouts_per_engine_rank)
        * run.plan.max_sequence_tokens,
    }


def _decoding_of(kernel: Kernel) -> tuple[AttendToCache, SampleTokens]:
    """Choose the attention to the cache and the sampling of tokens that match the kernel."""
    if kernel == "invariant":
        return attend_to_cache_in_tiles, functools.partial(sample_with_head_logprobs, invariant.HEAD)
    return attend_to_cache, sample_tokens


# The torch engine on a rank that does not train: it receives buckets by broadcast.


class DisaggregatedTorchEngine(TorchEngine):
    """A `TorchEngine` whose `load` receives the bucket first, into memory of its own."""

    def __init__(self, model_config: Any, weights: DeviceMesh, **settings: Any) -> None:
        """`weights` holds the sending rank first, then all that receive; `settings` go to `TorchEngine`."""
        super().__init__(model_config, **settings)
        self._group = weights.get_group()
        self._sender = int(weights.mesh[0])
        self._landing: Tensor | None = None

    def begin_update(self, buckets: Sequence[Bucket], buffers: Sequence[Tensor], *, version: int) -> None:
        largest = max(bucket.num_bytes for bucket in buckets)
        if self._landing is None or self._landing.numel() < largest:
            self._landing = self.allocate(largest)
        super().begin_update(buckets, [self._landing], version=version)

    def load(self, number: int) -> None:
        assert self._landing is not None
        landing = self._landing[: self._buckets[number].num_bytes]
        dist.broadcast(landing, src=self._sender, group=self._group)
        super().load(number)
