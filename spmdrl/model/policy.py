"""Models as training sees them: packed tokens in, something about each of them out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from spmdrl.model.attention import Attend, Kernel, packed_attention
from spmdrl.model.context import Style, context_attention, gather_tokens
from spmdrl.model.logprobs import place_at, predicting_rows
from spmdrl.model.operators import operators_of
from spmdrl.model.tensor_parallel import own_weight
from spmdrl.types import MicroBatch


@dataclass(frozen=True, slots=True)
class TokenScores:
    """What a forward pass says about each token of a micro-batch; entry t is about token t."""

    logprobs: Tensor  # [T] float32, nats; 0 for the first token of a sequence
    entropy: Tensor  # [T] float32, nats, of the distribution token t was drawn from


@dataclass(frozen=True, slots=True)
class _Predicting:
    """The rows of this rank's chunk from which a token of their own sequence is predicted."""

    hidden: Tensor  # [N, D], of the last layer
    rows: Tensor  # [N] int64, their places in the chunk
    tokens: Tensor  # [N] int64, the places in the micro-batch of what they predict
    chunk_tokens: int


class PackedModel(nn.Module):
    """A causal language model of transformers whose forward says something about each token of a micro-batch.

    It is the root that FSDP shards: the trunk, the final norm and the head are used together inside one forward. Every
    rank of a context-parallel mesh is given the whole micro-batch, computes its chunk, and is told about all tokens.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        kernel: Kernel,
        context: DeviceMesh | None = None,
        context_style: Style = "all_gather",
    ) -> None:
        """`context`: ranks that share a micro-batch's tokens; None stands for this rank alone."""
        super().__init__()
        self.model = model
        self.kernel: Kernel = kernel
        self.context = context
        self.context_style: Style = context_style

    def _predict(self, micro_batch: MicroBatch) -> _Predicting:
        """Run the layers on this rank's chunk."""
        seqlens, chunk = micro_batch.seqlens, self._chunk(len(micro_batch.token_ids))
        hidden = self.model.base_model(
            input_ids=micro_batch.token_ids[chunk].unsqueeze(0),
            position_ids=micro_batch.positions[chunk].unsqueeze(0),
            use_cache=False,
            attend=self._attend(micro_batch, seqlens),
            seqlens=seqlens,
        ).last_hidden_state.squeeze(0)
        rows = predicting_rows(micro_batch.positions, chunk)
        return _Predicting(hidden[rows], rows, chunk.start + rows + 1, len(hidden))

    def _of_tokens(self, values: Tensor, of: _Predicting) -> Tensor:
        """What predicting rows say, [N], as [T]: what is known about each token, 0 where nothing predicts it."""
        placed = place_at(of.rows, values, of.chunk_tokens)
        whole = placed if self.context is None else gather_tokens(placed, self.context)
        return F.pad(whole[:-1], (1, 0))

    def _chunk(self, num_tokens: int) -> slice:
        """This rank's tokens of a micro-batch."""
        if self.context is None:
            return slice(0, num_tokens)
        length, rest = divmod(num_tokens, self.context.size())
        assert not rest, f"{num_tokens} tokens were not filled up to a multiple of {self.context.size()}"
        start = self.context.get_local_rank() * length
        return slice(start, start + length)

    def _attend(self, micro_batch: MicroBatch, seqlens: list[int]) -> Attend:
        cu_seqlens = micro_batch.cu_seqlens
        if self.context is None:
            return packed_attention(cu_seqlens, seqlens, self.kernel, sampled=micro_batch.loss_mask)
        return context_attention(cu_seqlens, seqlens, self.kernel, self.context, style=self.context_style)


class Policy(PackedModel):
    """The model that samples: its forward scores every token given what precedes it in its own sequence."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        kernel: Kernel,
        temperature: float,
        logits_chunk_tokens: int,
        context: DeviceMesh | None = None,
        context_style: Style = "all_gather",
        vocabulary: DeviceMesh | None = None,
    ) -> None:
        """`vocabulary`: ranks over which the head is split; None stands for this rank alone."""
        super().__init__(model, kernel=kernel, context=context, context_style=context_style)
        self.temperature = temperature
        self.logits_chunk_tokens = logits_chunk_tokens
        self.vocabulary = vocabulary
        self.score_tokens = operators_of(kernel).score

    def forward(self, micro_batch: MicroBatch) -> TokenScores:
        """Score every token."""
        head, predicting = self.model.get_output_embeddings(), self._predict(micro_batch)
        scores = self.score_tokens(
            predicting.hidden,
            own_weight(head.weight),
            None if head.bias is None else own_weight(head.bias),
            micro_batch.token_ids[predicting.tokens],
            temperature=self.temperature,
            chunk=self.logits_chunk_tokens,
            vocabulary=self.vocabulary,
        )
        logprobs, entropy = (self._of_tokens(score, predicting) for score in scores)
        return TokenScores(logprobs, entropy)


class ValueHead(nn.Module):
    """A linear map of hidden states to one number, in float32; 0 for all of them at first."""

    def __init__(self, hidden_size: int, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, hidden_size, device=device))

    def forward(self, hidden: Tensor) -> Tensor:
        """[N, 1] float32 of hidden [N, D]."""
        return F.linear(hidden.float(), self.weight)


class Critic(PackedModel):
    """A model without its language head: its forward estimates, for every token, the return that is still to come
    before that token is chosen."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        kernel: Kernel,
        device: torch.device,
        context: DeviceMesh | None = None,
        context_style: Style = "all_gather",
    ) -> None:
        """`device`: where the head is made, which no file holds."""
        super().__init__(model, kernel=kernel, context=context, context_style=context_style)
        self.value_head = ValueHead(model.config.get_text_config().hidden_size, device)

    def forward(self, micro_batch: MicroBatch) -> Tensor:
        """Values [T] float32, in units of the reward; 0 for the first token of a sequence."""
        predicting = self._predict(micro_batch)
        return self._of_tokens(self.value_head(predicting.hidden).squeeze(-1), predicting)
