"""The embedded engine: continuous batching with a KV cache on the transformers model itself.

It starts in a second and runs wherever torch does. Other engines are tested against it.
"""

from __future__ import annotations

import copy
import functools
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.initialization import no_init_weights

from spmdrl.config import Config
from spmdrl.config.engines import ENGINES
from spmdrl.engine.adapters import AdapterBank, expert_problems
from spmdrl.engine.dense_decoder import DenseDecoder, can_decode
from spmdrl.engine.kv_cache import AttendToCache, KVCache, attend_to_cache, cannot_sample
from spmdrl.engine.protocol import RolloutEngine
from spmdrl.engine.remote import RemoteEngine
from spmdrl.engine.requests import RequestQueue
from spmdrl.engine.sampling import NOISE_PLACES, RowSampling, SampleTokens, sample_tokens, sample_with_head_logprobs
from spmdrl.engine.versions import LiveVersions
from spmdrl.model import invariant
from spmdrl.model.attention import IMPLEMENTATION, Kernel, packed_attention
from spmdrl.model.invariant_attention import attend_to_cache_in_tiles
from spmdrl.model.load import persistent_buffers
from spmdrl.model.operators import operators_of
from spmdrl.refit.bucket import Bucket
from spmdrl.refit.digest import digest, digests
from spmdrl.refit.sink import AdapterVersion
from spmdrl.run import Launch
from spmdrl.types import FinishReason, Request, Response, Span, UserError

MAX_PREFILL_TOKENS = 16384  # of different prompts in one forward pass
ASK_AGAIN_TOKENS = 16  # of each row, after which a caller that had nothing to start is asked again


@dataclass(slots=True)
class _Running:
    """A request that has a row in the cache."""

    index: int
    request: Request
    version: int  # of the weights that sample it
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    limit: int = field(init=False)  # tokens that may be sampled here

    def __post_init__(self) -> None:
        self.limit = self.request.max_response_tokens - len(self.request.response_ids)

    @property
    def num_sampled(self) -> int:
        """The response tokens so far, with those of an earlier request that this one continues."""
        return len(self.request.response_ids) + len(self.token_ids)

    @property
    def context(self) -> tuple[int, ...]:
        """The tokens before the first one that is sampled here."""
        return self.request.prompt_ids + self.request.response_ids

    def finish_reason(self) -> FinishReason | None:
        if self.token_ids[-1] in self.request.stop_token_ids:
            return "stop"
        if len(self.token_ids) == self.limit:
            return "length"
        return None


def model_problems(model_config: Any) -> Iterator[str]:
    """Yield a sentence when this engine cannot sample from such a model."""
    if "linear_attention" in (getattr(model_config, "layer_types", None) or ()):
        yield cannot_sample(model_config, "not the state of linear-attention layers")
    elif getattr(model_config, "kv_lora_rank", None) or getattr(model_config, "global_head_dim", None):
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
    ):
        """`release` lists what `sleep` gives back: "kv_cache", "weights" or both. Raises UserError when the engine
        cannot sample from such a model."""
        for problem in model_problems(model_config):
            raise UserError(problem)
        own_config = copy.deepcopy(model_config)  # building a model writes into its config
        with torch.device(device), no_init_weights():
            model = AutoModelForCausalLM.from_config(own_config, dtype=dtype, attn_implementation=IMPLEMENTATION)
        operators_of(kernel).install(model)
        model.tie_weights()
        super().__init__(model.device)
        self.model = model.eval().requires_grad_(False)
        self._adapters = AdapterBank(model, operators_of(kernel).linear)
        self._decoder = DenseDecoder(model, self._adapters) if kernel == "sdpa" and can_decode(model) else None
        self._kernel: Kernel = kernel
        self.attend_to_cache, self._sample_tokens = _decoding_of(kernel)
        self._max_running = max_running
        self._release = frozenset(release)
        self._cache: KVCache | None = None
        self.weights = dict(self.model.named_parameters()) | persistent_buffers(self.model)
        storages = [weight.untyped_storage() for weight in self.weights.values()]
        # Tied weights share one, and so do those that the decoder has put side by side.
        self._storages = [(storage, storage.nbytes()) for storage in {one._cdata: one for one in storages}.values()]
        self._missing: set[str] = set(self.weights)
        self._expected: dict[str, str] = {}  # digests, of all refits
        self._versions = LiveVersions()
        self._abort = self._asks = False

    @classmethod
    def problems(cls, cfg: Config, model_config: Any, *_: Any, **__: Any) -> Iterator[str]:
        yield from model_problems(model_config)
        yield from expert_problems(cfg, model_config)

    @classmethod
    def start(cls, run: Launch[Config]) -> RolloutEngine:
        return cls(run.inputs.model_config, **_settings(run), release=run.cfg.offload.engine)

    @classmethod
    def start_receiver(cls, run: Launch[Config]) -> RolloutEngine:
        from spmdrl.engine.receive import ListeningTorchEngine  # which is made of this class

        assert run.meshes.weights is not None
        return ListeningTorchEngine(run.inputs.model_config, run.meshes.weights, **_settings(run))

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
        source = RequestQueue(requests)
        waiting: deque[_Running] = deque()
        rows: list[_Running] = []
        sampling = self._sampling(rows)
        ahead = 0  # decode steps since the noise in `sampling` was made
        last = torch.empty(0, dtype=torch.int64, device=self.device)
        while True:
            if self._abort:
                self._end([*rows, *waiting])
                yield from ((run.index, self._response(run, "abort")) for run in (*rows, *waiting))
                return
            waiting.extend(self._taken(source, self._max_running - len(rows) - len(waiting)))
            if waiting and len(rows) < self._max_running:
                admitted = _admit(waiting, self._max_running - len(rows))
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
                kept = self._compact([why is None for why in reasons])
                finished = [(run, why) for run, why in zip(rows, reasons, strict=True) if why]
                rows = [rows[row] for row in kept]
                self._end([run for run, _ in finished])
                order = torch.tensor(kept, dtype=torch.int64, device=self.device)
                sampling, last = sampling.take(order), last[order]
                yield from ((run.index, self._response(run, why)) for run, why in finished)
                source.ask_again()

    def _taken(self, source: RequestQueue, num_free: int) -> Iterator[_Running]:
        for index, request in source.take(num_free):
            # Read now: to make the request the caller may have loaded a newer version.
            self._versions.begin(self.version)
            yield _Running(index, request, self.version)

    def _end(self, runs: Sequence[_Running]) -> None:
        """Free the adapters that only these runs needed."""
        for run in runs:
            self._versions.end(run.version)
        self._drop_dead()

    def _drop_dead(self) -> None:
        for version in self._versions.take_dead(self.version):
            self._adapters.drop(version)

    def abort(self) -> None:
        self._abort = True

    def wake_up(self) -> None:
        self._asks = True

    def sleep(self) -> None:
        """Return the memory to the device, not only to torch's allocator: training would otherwise allocate parts of
        it, and the next cache would not fit."""
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
        for name, tensor in self.tensors(number):
            self.weights[name].copy_(tensor)
            self._missing.discard(name)

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
        self._cache = None

    def _reserve(self, runs: Sequence[_Running], *, num_rows: int) -> None:
        """Make the cache large enough for these runs, and for `num_rows` rows if so many may run."""
        longest = max(len(run.request.prompt_ids) + run.request.max_response_tokens for run in runs)
        if self._cache is None:
            self._cache = KVCache(self.model.config, num_rows, longest, device=self.device, dtype=self.model.dtype)
        elif not self._cache.holds(len(runs), longest):
            self._cache.grow(min(num_rows, self._max_running), longest)

    @torch.inference_mode()
    def _prefill(self, runs: list[_Running], *, first_row: int) -> Tensor:
        """Fill rows first_row... of the cache; return the logits of each run's first response token, [n, V]."""
        contexts = sorted({(run.version, run.context) for run in runs}, key=lambda found: (len(found[1]), found))
        place = {context: i for i, context in enumerate(contexts)}
        prompts = [ids for _, ids in contexts]
        seqlens = [len(ids) for ids in prompts]
        self._adapters.choose((version, len(ids)) for version, ids in contexts)
        ends = torch.tensor(seqlens, device=self.device).cumsum(0)
        cu_seqlens = F.pad(ends, (1, 0)).to(torch.int32)
        assert self._cache is not None
        attend = self._cache.begin_prefill(
            packed_attention(cu_seqlens, seqlens, self._kernel),
            starts=cu_seqlens.tolist(),
            sequences=[place[run.version, run.context] for run in runs],
            first_row=first_row,
        )
        logits = self.model(
            input_ids=torch.tensor([token for ids in prompts for token in ids], device=self.device).unsqueeze(0),
            position_ids=torch.cat([torch.arange(n, device=self.device) for n in seqlens]).unsqueeze(0),
            use_cache=False,
            logits_to_keep=ends - 1,
            attend=attend,
        ).logits[0]
        return logits[torch.tensor([place[run.version, run.context] for run in runs], device=self.device)]

    @torch.inference_mode()
    def _decode(self, last: Tensor) -> Tensor:
        """Compute the logits [n, V] of the token after `last` [n] int64 in every row."""
        assert self._cache is not None
        attend, positions = self._cache.begin_decode(self.attend_to_cache)
        if self._decoder is not None:
            return self._decoder(last, positions, self._cache.longest, attend)
        return self.model(
            input_ids=last.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False, attend=attend
        ).logits[0]

    def _compact(self, unfinished: list[bool]) -> list[int]:
        """Keep the unfinished rows as rows 0, 1, ..., filling holes from the end; return the old row of each."""
        assert self._cache is not None
        num_kept = sum(unfinished)
        kept = list(range(num_kept))
        holes = [row for row in range(num_kept) if not unfinished[row]]
        movers = [row for row in range(num_kept, len(unfinished)) if unfinished[row]]
        for hole, mover in zip(holes, movers, strict=True):
            kept[hole] = mover
        self._cache.keep(kept, holes, movers)
        return kept

    def _sampling(self, runs: list[_Running]) -> RowSampling:
        places = [run.num_sampled for run in runs]
        return RowSampling.of([run.request for run in runs], places, self.device)

    def _append(self, runs: list[_Running], sampled: tuple[Tensor, Tensor], last: Tensor) -> Tensor:
        tokens, logprobs = sampled
        for run, token, logprob in zip(runs, tokens.tolist(), logprobs.tolist(), strict=True):
            run.token_ids.append(token)
            run.logprobs.append(logprob)
        return torch.cat([last, tokens]) if len(last) else tokens

    def _response(self, run: _Running, reason: FinishReason) -> Response:
        return Response(
            token_ids=tuple(run.token_ids),
            logprobs=tuple(run.logprobs),
            finish_reason=reason,
            spans=(Span(run.version, len(run.token_ids)),) if run.token_ids else (),
        )


def _admit(waiting: deque[_Running], num_free: int) -> list[_Running]:
    """Take requests from the front that fit into the free rows and one prefill; always at least one."""
    admitted: list[_Running] = []
    contexts: set[tuple[int, tuple[int, ...]]] = set()  # each version computes a context by itself
    while waiting and len(admitted) < num_free:
        context = (waiting[0].version, waiting[0].context)
        if admitted and sum(len(ids) for _, ids in contexts | {context}) > MAX_PREFILL_TOKENS:
            break
        contexts.add(context)
        admitted.append(waiting.popleft())
    return admitted


def _settings(run: Launch[Config]) -> dict[str, Any]:
    return {
        "device": run.device,
        "dtype": run.dtype,
        "kernel": run.kernel,
        "max_running": run.cfg.rollout.max_running,
    }


def _decoding_of(kernel: Kernel) -> tuple[AttendToCache, SampleTokens]:
    """Choose the attention to the cache and the sampling of tokens that match the kernel."""
    if kernel == "invariant":
        return attend_to_cache_in_tiles, functools.partial(sample_with_head_logprobs, invariant.HEAD)
    return attend_to_cache, sample_tokens
