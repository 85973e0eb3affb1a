"""The models that are trained: a packed micro-batch in, one value or two for each of its tokens out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from spmdrl.dist.collectives import sum_over
from spmdrl.families import LogitScale, VisionFamily
from spmdrl.model.attention import IMPLEMENTATION, on_packed, packed_attention
from spmdrl.model.attention_layer import Attend
from spmdrl.model.context import ContextRanks, context_attention, context_tree_attention, gather_tokens
from spmdrl.model.divergence import TeacherHead, top_tokens
from spmdrl.model.kernels import Kernel
from spmdrl.model.logits_tile import Scale
from spmdrl.model.logprobs import HeadOptions, over_candidates, place_at, predicted_by, predicting_tokens
from spmdrl.model.lora.adapters import Adapters
from spmdrl.model.mixer import NodeLevels
from spmdrl.model.operators import operators_of
from spmdrl.model.rotary import lengths_of_tokens
from spmdrl.model.routes import FREE, Routers
from spmdrl.model.tensor_parallel import local_part
from spmdrl.model.tree_attention import tree_attention
from spmdrl.model.trunk import PlacedFeatures, Trunk
from spmdrl.types import Grid, ImageSpan, MicroBatch, TopTokens


class TokenLogprobs(NamedTuple):
    """The policy's result for each token of a micro-batch; entry t is about token t.

    Both are 0 for tokens that are not `predicted`, and for the first token of a sequence: the head computes what is
    needed, and nothing of prompts or filling. It is a tuple because FSDP, up to torch 2.11, reduces no gradients of a
    model whose results are in anything but tuples, lists and dicts.
    """

    logprobs: Tensor  # [T] float32, nats
    entropy: Tensor  # [T] float32, nats, of the distribution that token t was sampled from
    divergence: Tensor | None = None  # [T] float32, nats, from the teacher's; 0 for tokens that are not distilled
    # Of the row that predicts a token, where routes are replayed: [T] float32, the share of its experts that the
    # model's own routers would not have taken; negative where it has no record, 0 for tokens that are not predicted.
    router_disagreement: Tensor | None = None
    expert_loads: Tensor | None = None  # [L, E] float32: of the same rows, those that went to each expert of a layer
    expert_imbalance: Tensor | None = None  # [T] float32, `Routers.imbalance` of the same rows, where it is wanted


@dataclass(frozen=True, slots=True)
class _PredictingRows:
    """The rows of this rank's chunk that predict a wanted token. There may be none; the head computes all the same.

    Tokens that sequences have in common predict several: such a row is there as often.
    """

    hidden: Tensor  # [N, D], output of the last layer
    rows: Tensor  # [N] int64, places of the rows in the chunk
    token_ids: Tensor  # [N] int64, the tokens they predict
    tokens: Tensor  # [N] int64 on the host, places of the tokens they predict in the micro-batch


class PackedModel(nn.Module):
    """A causal language model of transformers that runs on packed micro-batches.

    It is the root module that FSDP shards: trunk, final norm and head run inside one forward pass. Under context
    parallelism every rank takes the whole micro-batch, computes its own chunk, and returns the values of all tokens.

    It takes micro-batches on the host, and itself copies to the device what it computes with: how long sequences are,
    and which rows predict wanted tokens, is then known without waiting for the device.
    """

    forwards: ClassVar[tuple[str, ...]] = ()  # methods that compute as `forward` does, with gathered weights
    adapters: Adapters | None  # set after the model was sharded, where the model itself is frozen
    routers: Routers | None = None  # set where routes are recorded or replayed

    def __init__(self, model: PreTrainedModel, *, kernel: Kernel, context: ContextRanks | None = None) -> None:
        """`context` are the ranks that share a micro-batch's tokens; None is this rank alone."""
        super().__init__()
        self.model = model
        self.trunk = Trunk(model)
        calls = model.config.get_text_config()._attn_implementation
        assert calls == IMPLEMENTATION, f'the model calls attention "{calls}", which does not know of packed sequences'
        self.kernel: Kernel = kernel
        self.context = context
        self.register_module("adapters", None)

    def encode(self, pixels: Sequence[Tensor], grids: Sequence[Grid]) -> list[Tensor]:
        """Call `Trunk.encode`; of a sharded model, every rank must call this as often as the others."""
        return self.trunk.encode(pixels, grids)

    def summing_gradients(self) -> AbstractContextManager[None]:
        """Surround the backward passes of an update. FSDP sums its gradients in each of them, adapters at the end."""
        return self.adapters.summing_gradients() if self.adapters is not None else nullcontext()

    def refresh(self) -> None:
        """Take over what the optimizer or a checkpoint has changed; every rank that trains must call this."""
        if self.adapters is not None:
            self.adapters.refresh()

    def change_of(self, weight: str) -> Tensor | None:
        """Return what adapters add to a parameter of `model`, float32 in its shape; None where they add nothing."""
        return None if self.adapters is None else self.adapters.change_of(weight)

    def _predict(self, micro_batch: MicroBatch, wanted: Tensor) -> _PredictingRows:
        """Run the layers on this rank's chunk; `wanted` [T] bool are the tokens to predict."""
        hidden, rows, tokens = self._hidden_at(micro_batch, predicting_tokens(wanted, micro_batch.positions))
        targets = predicted_by(tokens)
        return _PredictingRows(hidden, rows, self._on_device(micro_batch.token_ids[targets]), targets)

    def _hidden_at(self, micro_batch: MicroBatch, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Run the layers on this rank's chunk; return the outputs [N, D] of the last for those of these tokens of the
        micro-batch that are in the chunk, their rows there, [N] int64, and which they are, the same on the host."""
        chunk = self._chunk(micro_batch.num_computed)
        rows = tokens if micro_batch.tree is None else micro_batch.tree.rows[tokens]
        own = (rows >= chunk.start) & (rows < chunk.stop)
        # Before the layers: a copy from the host may wait for all that the device has to do.
        own_rows = self._on_device(rows[own] - chunk.start)
        return self._hidden(micro_batch, chunk)[own_rows], own_rows, tokens[own]

    def _hidden(self, micro_batch: MicroBatch, chunk: slice) -> Tensor:
        """Run the layers on a chunk of the tokens that are computed; returns the output of the last, [n, D]."""
        seqlens, tree = micro_batch.seqlens, micro_batch.tree
        tokens = chunk if tree is None else tree.tokens[chunk]
        if self.routers is not None:
            routes = micro_batch.routes
            self.routers.replay(None if routes is None else self._on_device(routes[tokens]))
        return self.trunk(
            self._on_device(micro_batch.token_ids[tokens]),
            self._on_device(self._positions(micro_batch, seqlens)[..., tokens]),
            lengths=lengths_of_tokens(seqlens)[tokens],
            images=self._placed(micro_batch, chunk),
            attend=self._attend(micro_batch, seqlens),
            seqlens=seqlens if tree is None else NodeLevels(tree, self._device),
        )

    def _positions(self, micro_batch: MicroBatch, seqlens: list[int]) -> Tensor:
        """Return the positions of a micro-batch's tokens, [T] or [3, T]."""
        family = self.trunk.family
        if family is None or not family.has_grid_positions:
            return micro_batch.positions
        return packed_positions(seqlens, micro_batch.images, family=family)

    def _placed(self, micro_batch: MicroBatch, chunk: slice) -> PlacedFeatures | None:
        """Return the part of the images that is among this rank's tokens; None where the micro-batch has none.

        A trained tower gets an empty part, so that the backward pass reaches it too.
        """
        distinct, features = micro_batch.distinct_images, micro_batch.image_features
        if micro_batch.pixels is not None:
            grids = [image.grid for image in distinct.values()] or [self.trunk.blank_image()[1]]
            features = tuple(self.trunk.encode(micro_batch.pixels, grids))
        if features is None:
            assert not distinct, "nothing has encoded the images of this micro-batch"
            return None
        table = torch.cat([self._on_device(of_image) for of_image in features])
        starts = accumulate((image.num_tokens for image in distinct.values()), initial=0)
        start_of = dict(zip(distinct, starts, strict=False))
        sources = torch.full_like(micro_batch.token_ids, -1)  # of each token in the table
        sources[placeholder_rows(micro_batch.images)] = placeholder_rows(
            [replace(image, start=start_of[image.digest]) for image in micro_batch.images]
        )
        own = sources[chunk if micro_batch.tree is None else micro_batch.tree.tokens[chunk]]
        rows = torch.nonzero(own >= 0).flatten()
        return PlacedFeatures(self._on_device(rows), table[self._on_device(own[rows])])

    def _on_device(self, values: Tensor) -> Tensor:
        """Copy to where the model computes, which is not where FSDP keeps weights that are offloaded."""
        return values.to(self._device, non_blocking=True)

    @property
    def _device(self) -> torch.device:
        device: torch.device = self.model.get_input_embeddings().weight.device
        return device

    def _per_token(self, values: Tensor, tokens: Tensor, micro_batch: MicroBatch) -> Tensor:
        """Place values [N] of this rank at their tokens, [N] int64, and those of the other ranks: [T], 0 elsewhere."""
        placed = place_at(self._on_device(tokens), values, len(micro_batch.token_ids))
        if self.context is None:
            return placed
        mesh = self.context.mesh
        return gather_tokens(placed, mesh).unflatten(0, (mesh.size(), -1)).sum(0)

    def _chunk(self, num_tokens: int) -> slice:
        """Return this rank's tokens of a micro-batch."""
        if self.context is None:
            return slice(0, num_tokens)
        mesh = self.context.mesh
        length, rest = divmod(num_tokens, mesh.size())
        assert not rest, f"{num_tokens} tokens were not padded to a multiple of {mesh.size()}"
        start = mesh.get_local_rank() * length
        return slice(start, start + length)

    def _attend(self, micro_batch: MicroBatch, seqlens: list[int]) -> Attend:
        cu_seqlens, blocks = self._on_device(micro_batch.cu_seqlens), self.trunk.seen_whole(micro_batch.images)
        if micro_batch.tree is not None:
            assert not blocks, "preflight refuses prefix trees where the tokens of an image see each other"
            of_tree = (micro_batch.tree, self.kernel)
            if self.context is None:
                return on_packed(tree_attention(*of_tree, self._device))
            return context_tree_attention(*of_tree, self.context.mesh, style=self.context.style, device=self._device)
        if self.context is None:
            sampled = self._on_device(micro_batch.loss_mask)
            return packed_attention(cu_seqlens, seqlens, self.kernel, sampled=sampled, blocks=blocks)
        mesh, style = self.context
        return context_attention(cu_seqlens, seqlens, self.kernel, mesh, style=style, blocks=blocks)


@dataclass(frozen=True, slots=True)
class Teaching:
    """The teachers of an update, and the divergences that it takes from their distributions."""

    kinds: Sequence[str]  # the `Divergence` of each teacher
    beta: float  # of "jsd"
    # Of each teacher: its head, this rank's rows of it on the device; or the temperature of one that has the policy's;
    # None where it has named its most probable tokens.
    heads: Sequence[TeacherHead | float | None]


class Policy(PackedModel):
    """The policy: its forward pass gives each predicted token's logprob given those before it in its own sequence."""

    forwards = ("hidden", "top_tokens", "copied_head")
    teaching: Teaching | None = None  # set during updates that distil

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        kernel: Kernel,
        temperature: float,
        logits_chunk_tokens: int,
        context: ContextRanks | None = None,
        vocabulary: DeviceMesh | None = None,
    ) -> None:
        """`vocabulary` is the mesh of ranks over which the head is split; None is this rank alone."""
        super().__init__(model, kernel=kernel, context=context)
        self._logit_scale = LogitScale.of(model.config)
        self._options = HeadOptions(self._scale_at(temperature), logits_chunk_tokens, vocabulary)
        operators = operators_of(kernel)
        self.next_token_logprobs = operators.next_token_logprobs
        self.next_token_logprobs_of = operators.next_token_logprobs_of
        self.next_token_divergence = operators.next_token_divergence

    def forward(self, micro_batch: MicroBatch) -> TokenLogprobs:
        """Compute logprobs and entropy of the `predicted` tokens: the trunk, then `next_token_logprobs` of
        `logprobs.py` or, with an engine's bits, of `exact/`. In an update that distils, add the divergence of those for
        which there are a teacher's hidden states."""
        predicting, head = self._predict(micro_batch, micro_batch.predicted), self._head()
        if self.teaching is not None and micro_batch.teacher_outputs:
            columns = self._taught(micro_batch, predicting, head)
        elif micro_batch.candidates is not None:
            columns = self._among(micro_batch.candidates, predicting, head)
        else:
            columns = self.next_token_logprobs(predicting.hidden, *head, predicting.token_ids, self._options)
        found = TokenLogprobs(*(self._per_token(column, predicting.tokens, micro_batch) for column in columns))
        return found if self.routers is None else self._with_routing(found, micro_batch, predicting, self.routers)

    def _among(
        self, candidates: Tensor, predicting: _PredictingRows, head: tuple[Tensor, Tensor | None]
    ) -> tuple[Tensor, Tensor]:
        """Return logprobs and entropy [N] of the predicted tokens among their candidates, of all tokens [T, K]."""
        of_rows = self._on_device(candidates[predicting.tokens].long())
        logprobs, entropy, of_candidates = self.next_token_logprobs_of(
            predicting.hidden, *head, predicting.token_ids, of_rows, self._options
        )
        return over_candidates(logprobs, entropy, of_rows, of_candidates)

    def _with_routing(
        self, found: TokenLogprobs, micro_batch: MicroBatch, predicting: _PredictingRows, routers: Routers
    ) -> TokenLogprobs:
        """Add what the routers did in the forward pass."""
        loads = routers.loads(predicting.rows)
        if loads is not None and self.context is not None:
            loads = sum_over(self.context.mesh, loads)
        if routers.watches_scores:
            found = found._replace(expert_imbalance=self._imbalance(micro_batch, predicting, routers))
        if micro_batch.routes is None:
            return found._replace(expert_loads=loads)
        disagreement = self._per_token(routers.disagreement[predicting.rows], predicting.tokens, micro_batch)
        return found._replace(expert_loads=loads, router_disagreement=disagreement)

    def _imbalance(self, micro_batch: MicroBatch, predicting: _PredictingRows, routers: Routers) -> Tensor:
        """Return `Routers.imbalance` of the predicted tokens, [T]."""
        ends = micro_batch.cu_seqlens[1:].cpu()
        sequences = self._on_device(torch.searchsorted(ends, predicting.tokens.int(), right=True))
        loads = routers.sequence_loads(predicting.rows, sequences, len(ends))
        if self.context is not None:
            loads = sum_over(self.context.mesh, loads)
        return self._per_token(routers.imbalance(predicting.rows, sequences, loads), predicting.tokens, micro_batch)

    def own_routes(self, micro_batch: MicroBatch) -> Tensor:
        """Return the routes of the last forward pass, which was of this micro-batch: [T, L, k] int16, on the host.

        Those of other ranks' chunks are FREE: they are replayed by the ranks that have recorded them.
        """
        assert self.routers is not None, "nothing records the routes of this model"
        taken = self.routers.taken.cpu()
        routes = taken.new_full((micro_batch.num_computed, *taken.shape[1:]), FREE)
        routes[self._chunk(micro_batch.num_computed)] = taken
        return routes if micro_batch.tree is None else routes[micro_batch.tree.rows]

    def _head(self) -> tuple[Tensor, Tensor | None]:
        """Return this rank's rows of the head, weight [V, D] and bias [V]."""
        head = self.model.get_output_embeddings()
        return local_part(head.weight), None if head.bias is None else local_part(head.bias)

    def _scale_at(self, temperature: float) -> Scale:
        """Return what makes z of the head's outputs, for distributions at a temperature."""
        return Scale(temperature / self._logit_scale.factor, self._logit_scale.softcap)

    def _taught(
        self, micro_batch: MicroBatch, predicting: _PredictingRows, head: tuple[Tensor, Tensor | None]
    ) -> Iterable[Tensor]:
        """Return logprobs, entropy and divergence [N] of the predicted tokens, those of each teacher in turn."""
        assert self.teaching is not None
        alone = torch.ones(len(predicting.tokens), dtype=torch.bool)
        parts: list[tuple[Tensor, Iterable[Tensor]]] = []
        teachers = zip(self.teaching.kinds, self.teaching.heads, micro_batch.teacher_outputs, strict=True)
        for place, (kind, its_head, said) in enumerate(teachers):
            if said is None:
                continue
            mine = micro_batch.taught_by(place)[predicting.tokens]
            if isinstance(its_head, float):
                weight, bias = (None if x is None else x.detach() for x in head)
                assert weight is not None
                its_head = TeacherHead(weight=weight, bias=bias, scale=self._scale_at(its_head))
            rows = self._on_device(torch.nonzero(mine).flatten())
            teacher: dict[str, Any] = (
                {"teacher": said.to(rows.device)}
                if isinstance(said, TopTokens)
                else {"teacher": its_head, "teacher_hidden": self._on_device(said)}
            )
            found = self.next_token_divergence(
                predicting.hidden[rows],
                *head,
                predicting.token_ids[rows],
                self._options,
                kind=kind,
                beta=self.teaching.beta,
                **teacher,
            )
            parts.append((rows, found))
            alone &= ~mine
        if alone.any() or not parts:  # alike on all ranks that share the head
            rows = self._on_device(torch.nonzero(alone).flatten())
            logprobs, entropy = self.next_token_logprobs(
                predicting.hidden[rows], *head, predicting.token_ids[rows], self._options
            )
            parts.append((rows, (logprobs, entropy, torch.zeros_like(entropy))))
        order = torch.cat([rows for rows, _ in parts])
        joined = [torch.cat(columns) for columns in zip(*(found for _, found in parts), strict=True)]
        return [place_at(order, column, len(order)) for column in joined]

    def hidden(self, micro_batch: MicroBatch, place: int) -> Tensor:
        """Compute the hidden states [N, D] from which this rank's chunk predicts the N tokens that the teacher at this
        place teaches."""
        return self._predict(micro_batch, micro_batch.taught_by(place)).hidden

    def top_tokens(self, micro_batch: MicroBatch, place: int, *, k: int, num_rows: int) -> TopTokens:
        """Find the k most probable tokens after each of these hidden states, among the first `num_rows` of this rank's
        rows of the head."""
        weight, bias = self._head()
        return top_tokens(
            self._predict(micro_batch, micro_batch.taught_by(place)).hidden,
            weight[:num_rows],
            None if bias is None else bias[:num_rows],
            self._options,
            k=k,
        )

    @torch.no_grad()
    def copied_head(self, num_rows: int) -> TeacherHead:
        """Copy the first `num_rows` of this rank's rows of the head."""
        weight, bias = ((None if x is None else x[:num_rows].detach().clone()) for x in self._head())
        assert weight is not None and len(weight) == num_rows, "a teacher knows fewer tokens than the policy"
        return TeacherHead(weight=weight, bias=bias, scale=self._options.scale)

    @contextmanager
    def at_temperature(self, temperature: float) -> Iterator[None]:
        """Compute distributions at another temperature inside this block."""
        before, self._options = self._options, replace(self._options, scale=self._scale_at(temperature))
        try:
            yield
        finally:
            self._options = before

    @contextmanager
    def learning_from(self, teaching: Teaching) -> Iterator[None]:
        """Take divergences from these teachers inside this block."""
        self.teaching = teaching
        try:
            yield
        finally:
            self.teaching = None

    @property
    def num_head_rows(self) -> int:
        """Rows of the head on this rank."""
        whole: int = self.model.config.get_text_config().vocab_size
        return whole // (1 if self._options.vocabulary is None else self._options.vocabulary.size())


class ValueHead(nn.Module):
    """A linear map from hidden states to one number or several, in float32. Its weights start at 0."""

    def __init__(self, hidden_size: int, device: torch.device, num_values: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_values, hidden_size, device=device))

    def forward(self, hidden: Tensor) -> Tensor:
        """Map hidden [N, D] to values [N, num_values] float32."""
        return F.linear(hidden.float(), self.weight)


class Critic(PackedModel):
    """The critic: a model with a value head, which estimates the return to come before each token is chosen."""

    def __init__(
        self, model: PreTrainedModel, *, kernel: Kernel, device: torch.device, context: ContextRanks | None = None
    ) -> None:
        """`device` is where the value head is created; no file holds its weights."""
        super().__init__(model, kernel=kernel, context=context)
        self.value_head = ValueHead(model.config.get_text_config().hidden_size, device)

    def forward(self, micro_batch: MicroBatch) -> Tensor:
        """Compute values [T] float32, in units of the reward; 0 outside loss_mask."""
        predicting = self._predict(micro_batch, micro_batch.loss_mask)
        return self._per_token(self.value_head(predicting.hidden).squeeze(-1), predicting.tokens, micro_batch)


class RewardModel(PackedModel):
    """A model that gives a whole sequence one number: its head is a line of weights, at the sequence's last token."""

    def __init__(
        self, model: PreTrainedModel, *, kernel: Kernel, label: int = 0, context: ContextRanks | None = None
    ) -> None:
        """The head is `model.score`; `label` is the line that counts, of a head that has several."""
        super().__init__(model, kernel=kernel, context=context)
        self.label = label

    def forward(self, micro_batch: MicroBatch) -> Tensor:
        """Compute scores [T] float32 at the tokens of loss_mask, which are the last of their sequences; 0 elsewhere."""
        hidden, _, tokens = self._hidden_at(micro_batch, torch.nonzero(micro_batch.loss_mask).flatten())
        score: ValueHead = self.model.score  # where transformers' classifiers have it
        return self._per_token(score(hidden)[:, self.label], tokens, micro_batch)


# The positions of tokens in their sequences, as rotary embeddings count them.
#
# Text counts tokens. Where a model has positions of frame, row and column (mRoPE), the placeholders of an image have
# their patch's place in its grid, all counted from the position after the token before; text continues after the
# greatest. Which tokens are placeholders is known from `ImageSpan`, never from a token's number: a placeholder that
# the policy sampled itself is text.


def token_positions(num_tokens: int, images: Sequence[ImageSpan], *, family: VisionFamily | None) -> Tensor:
    """Return the positions of one sequence: [T] int64, or [3, T] for a family with grids (frame, row, column).

    `images` are in order, counted from the sequence's first token; all their placeholders are among its T tokens.
    """
    places = torch.arange(num_tokens)
    if family is None or not family.has_grid_positions:
        return places
    parts: list[Tensor] = []
    end = shift = 0  # the first token after the image before, and what its position has more than its place
    for image in images:
        parts.append((places[end : image.start] + shift).expand(3, -1))
        parts.append(_in_grid(image, family) + image.start + shift)
        end, shift = image.end, shift + _shift(image, family)
    return torch.cat([*parts, (places[end:] + shift).expand(3, -1)], dim=-1)


def position_shift(images: Sequence[ImageSpan], *, family: VisionFamily | None) -> int:
    """Return what the position of a token of text has more than its place, after these images of its sequence.

    An engine that decodes gives token t the position t + shift.
    """
    if family is None or not family.has_grid_positions:
        return 0
    return sum(_shift(image, family) for image in images)


def packed_positions(seqlens: Sequence[int], images: Sequence[ImageSpan], *, family: VisionFamily | None) -> Tensor:
    """Return `token_positions` of sequences that are laid end to end: [T] or [3, T].

    `images` are in order, counted from the first token of the first sequence.
    """
    parts, start, rest = [], 0, list(images)
    for length in seqlens:
        own = []
        while rest and rest[0].start < start + length:
            own.append(rest.pop(0).moved(-start))
        parts.append(token_positions(length, own, family=family))
        start += length
    return torch.cat(parts, dim=-1)


def placeholder_rows(images: Sequence[ImageSpan]) -> Tensor:
    """Return the places of the images' placeholders, [N] int64, in order."""
    return torch.cat([torch.arange(0), *(torch.arange(image.start, image.end) for image in images)])


def _grid(image: ImageSpan, family: VisionFamily) -> tuple[int, int, int]:
    """Return (frames, rows, columns) of the image's tokens."""
    frames, rows, columns = image.grid
    return frames, rows // family.merge, columns // family.merge


def _in_grid(image: ImageSpan, family: VisionFamily) -> Tensor:
    """Return [3, num_tokens] int64: the place of each token in the image."""
    frames, rows, columns = map(torch.arange, _grid(image, family))
    return torch.stack(torch.meshgrid(frames, rows, columns, indexing="ij")).flatten(1)


def _shift(image: ImageSpan, family: VisionFamily) -> int:
    """Return what positions after the image have more than before it: a grid's longest side, less its tokens."""
    _, rows, columns = _grid(image, family)
    return max(rows, columns) - image.num_tokens
