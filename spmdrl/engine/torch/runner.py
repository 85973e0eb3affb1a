"""The forward passes of the torch engine: prefill, extend and decode, each followed by sampling one token for each row.

prefill   prompts from their beginnings, packed; requests with equal prefixes share one sequence
extend    what follows cached prefixes, packed
decode    one token for each running row
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from spmdrl.data.image_store import ImageStore
from spmdrl.engine.torch.adapters import AdapterBank
from spmdrl.engine.torch.cache import AttendToCache, ImageFeatures, RowCache, attend_to_cache
from spmdrl.engine.torch.sampling import (
    NOISE_PLACES,
    RowSampling,
    SampleTokens,
    sample_tokens,
    sample_with_head_logprobs,
)
from spmdrl.engine.torch.scheduler import RequestState
from spmdrl.families import LogitScale
from spmdrl.model.attention import Kernel, packed_attention
from spmdrl.model.cpu_room import cpu_room
from spmdrl.model.exact import invariant
from spmdrl.model.exact.invariant import attend_to_cache_in_tiles
from spmdrl.model.operators import operators_of
from spmdrl.model.policy import packed_positions, position_shift
from spmdrl.model.routes import Routers
from spmdrl.model.trunk import Trunk

# A token for each row, its log-probability in nats, and its candidates, [K] on the host, where any row has a top-k.
Sampled = tuple[list[int], list[float], Sequence[Tensor | None]]


class ModelRunner:
    """Computes on the model, with the memory of the running requests on its device.

    Row i of the cache, of the newest tokens and of the sampling settings belongs to running request i.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        kernel: Kernel,
        max_running: int,
        images: ImageStore | None,
        max_patches: int,
        records_routes: bool = False,
    ) -> None:
        """`images` holds the pixels of the images in requests, of which the model's tower encodes `max_patches` in one
        pass."""
        self._model, self._kernel, self._max_running = model, kernel, max_running
        self._trunk, self._logit_scale = Trunk(model), LogitScale.of(model.config)
        self.images = ImageFeatures(self._trunk, images, max_patches=max_patches)
        self.adapters = AdapterBank(model, operators_of(kernel).linear)
        room = cpu_room() if kernel == "sdpa" and model.device.type == "cpu" else None
        self.decoder = None if room is None else room.decoder(model, self.adapters)
        self._attend_to_cache, self._sample_tokens = _decoding_of(kernel)
        self._routers = Routers(model) if records_routes else None
        assert self._routers is None or self.decoder is None, "a decoder of dense layers has no routers"
        self.cache: RowCache | None = None
        self.num_decodes = 0  # steps since the noise in `_sampling` was made
        self.reset()

    def reset(self) -> None:
        """Forget all rows and all images: no bit of an answer depends on earlier calls of `generate`."""
        self.images.clear()
        self._newest = torch.empty(0, dtype=torch.int64, device=self._model.device)  # token of each row, [n]
        self.begin_decoding([])

    def prefill(self, admitted: list[RequestState], running: Sequence[RequestState], *, num_waiting: int) -> Sampled:
        """Fill the last rows of `running`, those of `admitted`, and sample the first token of each.

        All of `admitted` have a cached prefix, or none has. The cache gets room for `num_waiting` more rows.
        `begin_decoding` must follow.
        """
        first_row = len(running) - len(admitted)
        self._reserve(running, num_rows=len(running) + num_waiting)
        compute = self._prefill if admitted[0].cached is None else self._extend
        logits = compute(admitted, first_row=first_row)
        tokens, logprobs, candidates = self._sample_tokens(logits, self._sampling_of(admitted), 0)
        self._newest = torch.cat([self._newest, tokens]) if first_row else tokens
        return _on_host(tokens, logprobs, candidates)

    def begin_decoding(self, running: Sequence[RequestState]) -> None:
        """Take the sampling settings of all rows after a prefill, with noise for their next tokens."""
        self._sampling, self.num_decodes = self._sampling_of(running), 0

    def decode(self, running: Sequence[RequestState]) -> Sampled:
        """Sample the next token of every row."""
        if self.num_decodes == NOISE_PLACES:
            self._sampling, self.num_decodes = self._sampling.at([state.num_sampled for state in running]), 0
        self.adapters.choose((state.version, 1) for state in running)
        logits = self._decode()
        self._record([[state] for state in running], [1] * len(running))
        self._newest, logprobs, candidates = self._sample_tokens(logits, self._sampling, self.num_decodes)
        self.num_decodes += 1
        return _on_host(self._newest, logprobs, candidates)

    def compact(self, rows: list[int]) -> None:
        """Make row i what row rows[i] was; forget the others."""
        assert self.cache is not None
        self.cache.compact(rows)
        index = torch.tensor(rows, dtype=torch.int64, device=self._newest.device)
        self._sampling, self._newest = self._sampling.take(index), self._newest[index]

    def _reserve(self, running: Sequence[RequestState], *, num_rows: int) -> None:
        """Make the cache large enough for these requests, and for `num_rows` rows if as many may run."""
        longest = max(len(state.request.prompt_ids) + state.request.max_response_tokens for state in running)
        if self.cache is None:
            config = self._model.config.get_text_config()
            self.cache = RowCache(config, num_rows, longest, device=self._model.device, dtype=self._model.dtype)
        elif not self.cache.fits(len(running), longest):
            self.cache.grow(min(num_rows, self._max_running), longest)

    @torch.inference_mode()
    def _prefill(self, admitted: list[RequestState], *, first_row: int) -> Tensor:
        """Read each prefix once, from its beginning; return the logits [n, V] after that of each request."""
        prefixes = sorted({state.prefix for state in admitted}, key=lambda prefix: prefix.sort_key)
        place = {prefix: i for i, prefix in enumerate(prefixes)}
        sequences = [place[state.prefix] for state in admitted]
        seqlens = [len(prefix.token_ids) for prefix in prefixes]
        starts = [0, *itertools.accumulate(seqlens)]
        images = [image.moved(start) for start, one in zip(starts, prefixes, strict=False) for image in one.images]
        self.adapters.choose((prefix.version, len(prefix.token_ids)) for prefix in prefixes)
        features = self.images.placed(images)
        device = self._model.device
        cu_seqlens = torch.tensor(starts, dtype=torch.int32, device=device)
        assert self.cache is not None
        inputs = self.cache.begin_prefill(
            packed_attention(cu_seqlens, seqlens, self._kernel, blocks=self._trunk.seen_whole(images)),
            seqlens=seqlens,
            shifts=[position_shift(prefix.images, family=self._trunk.family) for prefix in prefixes],
            sequences=sequences,
            first_row=first_row,
        )
        hidden = self._trunk(
            torch.tensor([token for prefix in prefixes for token in prefix.token_ids], device=device),
            packed_positions(seqlens, images, family=self._trunk.family).to(device),
            images=features,
            **inputs,
        )
        by_prefix: list[list[RequestState]] = [[] for _ in prefixes]
        for state, number in zip(admitted, sequences, strict=True):
            state.num_cached = seqlens[number] if by_prefix[number] else 0
            by_prefix[number].append(state)
        self._record(by_prefix, seqlens)
        logits = self._head(hidden[cu_seqlens[1:] - 1])
        return logits[torch.tensor(sequences, device=device)]

    @torch.inference_mode()
    def _extend(self, admitted: list[RequestState], *, first_row: int) -> Tensor:
        """Read what follows the cached prefix of each request; return the logits [n, V] after that."""
        cached = [state.cached.contents for state in admitted if state.cached is not None]
        uncached = [state.uncached_ids for state in admitted]
        seqlens = [len(token_ids) for token_ids in uncached]
        self.adapters.choose(zip((state.version for state in admitted), seqlens, strict=True))
        assert self.cache is not None
        inputs, extend, positions = self.cache.begin_extend(
            cached,
            seqlens=seqlens,
            shifts=[position_shift(state.request.images, family=self._trunk.family) for state in admitted],
            kernel=self._kernel,
            first_row=first_row,
        )
        for state in admitted:
            assert state.cached is not None
            state.routes += () if state.cached.routes is None else (state.cached.routes,)
            state.num_cached = len(state.cached.prefix.token_ids)
            state.cached = None  # its row has it now
        device = self._model.device
        token_ids = torch.tensor([token for one in uncached for token in one], device=device)
        last_ones = torch.tensor(seqlens, device=device).cumsum(0) - 1
        if self.decoder is not None:
            return self.decoder(token_ids, positions, self.cache.longest, extend, last_ones)
        hidden = self._trunk(token_ids, positions, **inputs)
        self._record([[state] for state in admitted], seqlens)
        return self._head(hidden[last_ones])

    @torch.inference_mode()
    def _decode(self) -> Tensor:
        """Return the logits [n, V] after the newest token of every row."""
        assert self.cache is not None
        inputs, decode, positions = self.cache.begin_decode(self._attend_to_cache)
        if self.decoder is not None:
            return self.decoder(self._newest, positions, self.cache.longest, decode)
        return self._head(self._trunk(self._newest, positions, **inputs))

    def _record(self, states: Sequence[Sequence[RequestState]], seqlens: Sequence[int]) -> None:
        """Note the routes of the tokens that the trunk has just read: sequences, each of one request or several."""
        if self._routers is None:
            return
        parts = self._routers.taken.cpu().split(list(seqlens))
        for routes, of_sequence in zip(parts, states, strict=True):
            for state in of_sequence:
                state.routes.append(routes)

    def _head(self, hidden: Tensor) -> Tensor:
        """Map hidden states [n, D] to logits [n, V]."""
        return self._logit_scale(self._model.get_output_embeddings()(hidden))

    def _sampling_of(self, states: Sequence[RequestState]) -> RowSampling:
        places = [state.num_sampled for state in states]
        return RowSampling.of([state.request for state in states], places, self._model.device)


def _on_host(tokens: Tensor, logprobs: Tensor, candidates: Tensor | None) -> Sampled:
    rows = [None] * len(tokens) if candidates is None else candidates.int().cpu().unbind()
    return tokens.tolist(), logprobs.tolist(), rows


def _decoding_of(kernel: Kernel) -> tuple[AttendToCache, SampleTokens]:
    """Choose the attention to the cache and the sampling of tokens that match the kernel."""
    if kernel == "invariant":
        return attend_to_cache_in_tiles, functools.partial(sample_with_head_logprobs, invariant.HEAD)
    return attend_to_cache, sample_tokens
