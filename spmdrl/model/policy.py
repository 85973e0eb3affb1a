"""The model as training sees it: packed tokens in, log-probabilities out."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from spmdrl.model.attention import Attend, Kernel, packed_attention
from spmdrl.model.context import Style, context_attention, gather_tokens
from spmdrl.model.logprobs import next_token_scores, place_at, predicting_rows
from spmdrl.model.operators import operators_of
from spmdrl.model.tensor_parallel import own_weight
from spmdrl.types import MicroBatch


@dataclass(frozen=True, slots=True)
class TokenScores:
    """What a forward pass says about each token of a micro-batch; entry t is about token t."""

    logprobs: Tensor  # [T] float32, nats; 0 for the first token of a sequence
    entropy: Tensor  # [T] float32, nats, of the distribution token t was drawn from


class Policy(nn.Module):
    """A causal language model of transformers whose forward scores a micro-batch.

    It is the root that FSDP shards: the trunk, the final norm and the head are used together inside one forward. Every
    rank of a context-parallel mesh is given the whole micro-batch, computes its chunk, and gets the scores of all.
    """

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
        """`context`: ranks that share a micro-batch's tokens; `vocabulary`: ranks over which the head is split. None
        stands for this rank alone."""
        super().__init__()
        self.model = model
        self.kernel: Kernel = kernel
        self.temperature = temperature
        self.logits_chunk_tokens = logits_chunk_tokens
        self.context = context
        self.context_style: Style = context_style
        self.vocabulary = vocabulary
        self.score_tokens = next_token_scores

    def forward(self, micro_batch: MicroBatch) -> TokenScores:
        """Score every token given what precedes it in its own sequence."""
        trunk, head = self.model.base_model, self.model.get_output_embeddings()
        seqlens, chunk = micro_batch.seqlens, self._chunk(len(micro_batch.token_ids))
        hidden = trunk(
            input_ids=micro_batch.token_ids[chunk].unsqueeze(0),
            position_ids=micro_batch.positions[chunk].unsqueeze(0),
            use_cache=False,
            attend=self._attend(micro_batch.cu_seqlens, seqlens),
            seqlens=seqlens,
        ).last_hidden_state.squeeze(0)
        rows = predicting_rows(micro_batch.positions, chunk)
        scores = self.score_tokens(
            hidden[rows],
            own_weight(head.weight),
            None if head.bias is None else own_weight(head.bias),
            micro_batch.token_ids[chunk.start + rows + 1],
            temperature=self.temperature,
            chunk=self.logits_chunk_tokens,
            vocabulary=self.vocabulary,
            head=operators_of(self.kernel).head,
        )
        logprobs, entropy = (self._of_tokens(place_at(rows, score, len(hidden))) for score in scores)
        return TokenScores(logprobs, entropy)

    def _chunk(self, num_tokens: int) -> slice:
        """This rank's tokens of a micro-batch."""
        if self.context is None:
            return slice(0, num_tokens)
        length, rest = divmod(num_tokens, self.context.size())
        assert not rest, f"{num_tokens} tokens were not filled up to a multiple of {self.context.size()}"
        start = self.context.get_local_rank() * length
        return slice(start, start + length)

    def _attend(self, cu_seqlens: Tensor, seqlens: list[int]) -> Attend:
        if self.context is None:
            return packed_attention(cu_seqlens, seqlens, self.kernel)
        return context_attention(cu_seqlens, seqlens, self.kernel, self.context, style=self.context_style)

    def _of_tokens(self, values: Tensor) -> Tensor:
        """What this rank's rows say about the tokens after them, as [T]: what is known about each token."""
        whole = values if self.context is None else gather_tokens(values, self.context)
        return F.pad(whole[:-1], (1, 0))
