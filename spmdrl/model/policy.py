"""The model as training sees it: packed tokens in, log-probabilities out."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from spmdrl.model.attention import Kernel, packed_attention
from spmdrl.model.logprobs import next_token_scores, predicting_rows
from spmdrl.types import MicroBatch


@dataclass(frozen=True, slots=True)
class TokenScores:
    """What a forward pass says about each token of a micro-batch; entry t is about token t."""

    logprobs: Tensor  # [T] float32, nats; 0 for the first token of a sequence
    entropy: Tensor  # [T] float32, nats, of the distribution token t was drawn from


class Policy(nn.Module):
    """A causal language model of transformers whose forward scores a micro-batch.

    It is the root that FSDP shards: the trunk, the final norm and the head are used together inside one forward.
    """

    def __init__(self, model: PreTrainedModel, *, kernel: Kernel, temperature: float, logits_chunk_tokens: int) -> None:
        super().__init__()
        self.model = model
        self.kernel: Kernel = kernel
        self.temperature = temperature
        self.logits_chunk_tokens = logits_chunk_tokens

    def forward(self, micro_batch: MicroBatch) -> TokenScores:
        """Score every token given what precedes it in its own sequence."""
        trunk, head = self.model.base_model, self.model.get_output_embeddings()
        hidden = trunk(
            input_ids=micro_batch.token_ids.unsqueeze(0),
            position_ids=micro_batch.positions.unsqueeze(0),
            use_cache=False,
            attend=packed_attention(micro_batch.cu_seqlens, micro_batch.seqlens, self.kernel),
        ).last_hidden_state.squeeze(0)
        logprobs, entropy = next_token_scores(
            hidden,
            _whole(head.weight),
            None if head.bias is None else _whole(head.bias),
            micro_batch.token_ids,
            predicting_rows(micro_batch.positions),
            temperature=self.temperature,
            chunk=self.logits_chunk_tokens,
        )
        return TokenScores(logprobs, entropy)


def _whole(parameter: Tensor) -> Tensor:
    """A parameter of the head, all of it where ranks have parts."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
