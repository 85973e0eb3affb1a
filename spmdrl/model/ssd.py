"""The state space rule of Mamba 2 over packed sequences, each of which starts from its own state.

The rule keeps a matrix S for each head of each sequence. With each token S decays, the token's value is written at its
key, and its query reads the result; a group of heads shares keys and queries (B and C in the papers' words):

    S <- exp(decay) S + k v,    out = q S

Sequences are cut into chunks, as for gated delta nets (`chunks.py`). Inside a chunk the rule is attention without a
softmax, and what a chunk writes does not depend on the state before it; so all of that is computed for all chunks of
all sequences at once. From chunk to chunk, states are only multiplied by a number and added to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from spmdrl.model.chunks import Chunks, cut, of_spans, running_sums

_CHUNK_TOKENS = 64
_CPU_BLOCK_BYTES = 2**25  # of one value of each token in the heads that are computed together
_CUDA_BLOCK_BYTES = 2**26  # enough to keep a device busy; some ten times as much exists at a time


def state_space_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, seqlens: list[int], state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return (out [T, H, P] float32, the states [S, H, N, P] float32 after each sequence's last token).

    query and key are [T, G, N] and serve H / G neighbouring heads each; value is [T, H, P], and decay (a logarithm, at
    most 0) [T, H]. Sequences start from state [S, H, N, P]; None is 0. All is computed in float32.
    """
    query, key, value, decay = (x.float() for x in (query, key, value, decay))
    if max(seqlens) == 1:
        return _one_token_each(query, key, value, decay, state)
    return _rule(query, key, value, decay, state, seqlens)


def _one_token_each(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute the rule for one token of each sequence, as an engine decodes."""
    heads = value.shape[1] // key.shape[1]
    q, k = (x.repeat_interleave(heads, dim=1) for x in (query, key))
    written = k.unsqueeze(-1) * value.unsqueeze(-2)
    after = written if state is None else torch.addcmul(written, state, decay.exp()[..., None, None])
    return torch.matmul(q.unsqueeze(-2), after).squeeze(-2), after


class _Block:
    """The values that forward and backward share, for g groups of p heads each.

    Its tensors are [B, C, ...] for B = N g chunks of groups, of C tokens; the values of a group's heads are side by
    side. Those in which heads differ in more than values are [B p, C, ...].
    """

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, state: Tensor | None, chunks: Chunks):
        """Query and key are [T, g, D], value [T, g, p, P], decay [T, g, p] and state [S, g, p, D, P]."""
        self.chunks, self.num_groups, self.heads, self.width = chunks, value.shape[1], value.shape[2], value.shape[3]
        self.q, self.k, self.v = chunks.lay_out(query), chunks.lay_out(key), chunks.lay_out(value.flatten(2))
        total = running_sums(chunks.lay_out(decay))  # [B, C, p]
        last = total[:, -1:]
        self.since_start, self.to_end, self.of_chunk = map(
            self._spread, (total.exp(), (last - total).exp(), last.exp())
        )
        by_head = self._by_head(total.unsqueeze(-1))
        later = torch.ones(chunks.size, chunks.size, dtype=torch.bool, device=total.device).triu_(1)
        # Masked before exp: decay from later tokens would be growth, and may overflow.
        self.between = (by_head - by_head.transpose(1, 2)).masked_fill_(later, -torch.inf).exp_()  # [B p, C, C]
        scores = torch.bmm(self.q, self.k.transpose(1, 2))
        self.attention = (self.between.unflatten(0, (-1, self.heads)) * scores.unsqueeze(1)).flatten(0, 1)
        self.writing = self.v * self.to_end
        self.states, self.final = self._scan(torch.bmm(self.k.transpose(1, 2), self.writing), state)

    def _spread(self, x: Tensor) -> Tensor:
        """Give each of a group's values what belongs to its head: [B, C, p] to [B, C, p P]."""
        return x.repeat_interleave(self.width, dim=-1)

    def _by_head(self, x: Tensor) -> Tensor:
        """[B, C, p, X] to [B p, C, X]."""
        return x.transpose(1, 2).flatten(0, 1)

    def _narrow(self, x: Tensor) -> Tensor:
        """[B, C, p P] to [B p, C, P]."""
        return self._by_head(x.unflatten(-1, (self.heads, self.width)))

    def _wide(self, x: Tensor) -> Tensor:
        """[B p, C, X] back to [B, C, p X]."""
        return x.unflatten(0, (-1, self.heads)).transpose(1, 2).flatten(2)

    def _of_heads(self, x: Tensor) -> Tensor:
        """Sum over the values of each head: [B, C, p P] to [B, C, p]."""
        return x.unflatten(-1, (self.heads, self.width)).sum(-1)

    def _scan(self, written: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the states before each chunk [B, D, p P], and those after each sequence, longest first."""
        if state is None:
            now = written.new_zeros(self.chunks.counts[0] * self.num_groups, *written.shape[1:])
        else:
            now = state[self.chunks.order].float().transpose(2, 3).flatten(3).flatten(0, 1)
        states = torch.empty_like(written)
        for step in self.chunks.steps(self.num_groups):
            before = now[: step.stop - step.start]  # of the sequences that have such a chunk
            states[step] = before
            before.mul_(self.of_chunk[step]).add_(written[step])
        return states, now

    def out(self) -> tuple[Tensor, Tensor]:
        """Return (out [T, g, p, P], final states [S, g, p, D, P])."""
        out = torch.bmm(self.q, self.states).mul_(self.since_start)
        out += self._wide(torch.bmm(self.attention, self._narrow(self.v)))
        return self._tokens(out), self._of_sequences(self.final)

    def _tokens(self, x: Tensor) -> Tensor:
        return self.chunks.tokens(x, self.num_groups).unflatten(-1, (self.heads, -1))

    def _of_sequences(self, states: Tensor) -> Tensor:
        by_group = states.unflatten(0, (-1, self.num_groups))[self.chunks.ranks]
        return by_group.unflatten(-1, (self.heads, -1)).transpose(2, 3)

    def backward(self, grad: Tensor, grad_final: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of query, key, value, decay and state for those of `out`."""
        by_out = self.chunks.lay_out(grad.flatten(2))
        by_read = by_out * self.since_start
        by_states = torch.bmm(self.q.transpose(1, 2), by_read)
        by_state = grad_final[self.chunks.order].transpose(2, 3).flatten(3).flatten(0, 1)
        by_written, by_decay_of_chunk = torch.empty_like(by_states), torch.empty_like(self.of_chunk)
        for step in reversed([*self.chunks.steps(self.num_groups)]):
            after = by_state[: step.stop - step.start]
            by_written[step] = after
            by_decay_of_chunk[step] = (self.states[step] * after).sum(1, keepdim=True)
            after.mul_(self.of_chunk[step]).add_(by_states[step])

        # First through states: a token's decay is in what it and later ones read of the state, in what earlier ones
        # wrote, and in the state that is left.
        read = self._of_heads(torch.bmm(self.q, self.states).mul_(by_read))
        by_q = torch.bmm(by_read, self.states.transpose(1, 2))
        by_k = torch.bmm(self.writing, by_written.transpose(1, 2))
        by_v = torch.bmm(self.k, by_written).mul_(self.to_end)
        written = self._of_heads(by_v * self.v)
        by_decay = running_sums(read.flip(1)).flip(1)
        by_decay[:, 1:] += running_sums(written[:, :-1])
        by_decay += self._of_heads(by_decay_of_chunk.mul_(self.of_chunk))
        # Then what tokens of a chunk have from each other.
        by_head, value = self._narrow(by_out), self._narrow(self.v)
        by_attention = torch.bmm(by_head, value.transpose(1, 2))
        by_v += self._wide(torch.bmm(self.attention.transpose(1, 2), by_head))
        by_decay += self._wide(of_spans(by_attention * self.attention))
        by_scores = by_attention.mul_(self.between).unflatten(0, (-1, self.heads)).sum(1)
        by_q.baddbmm_(by_scores, self.k)
        by_k.baddbmm_(by_scores.transpose(1, 2), self.q)
        return (
            self.chunks.tokens(by_q, self.num_groups),
            self.chunks.tokens(by_k, self.num_groups),
            self._tokens(by_v),
            self._tokens(by_decay).squeeze(-1),
            self._of_sequences(by_state),
        )


def _blocks(key: Tensor, value: Tensor, chunks: Chunks) -> Iterator[tuple[slice, slice]]:
    """Yield (groups, heads) that are computed together: several groups, or a part of the heads of one."""
    num_groups, num_heads = key.shape[1], value.shape[1]
    per_group = num_heads // num_groups
    head_bytes = sum(chunks.counts) * chunks.size * value.shape[-1] * 4
    together = max(1, (_CUDA_BLOCK_BYTES if value.is_cuda else _CPU_BLOCK_BYTES) // head_bytes)
    step = together if together < per_group else together // per_group * per_group
    for group in range(0, num_groups, max(1, step // per_group)):
        groups = slice(group, min(num_groups, group + max(1, step // per_group)))
        for first in range(groups.start * per_group, groups.stop * per_group, step):
            yield groups, slice(first, min(first + step, groups.stop * per_group))


def _block(inputs: Sequence[Tensor], state: Tensor | None, parts: tuple[slice, slice], chunks: Chunks) -> _Block:
    query, key, value, decay = inputs
    groups, heads = parts
    split = (groups.stop - groups.start, -1)
    initial = None if state is None else state[:, heads].unflatten(1, split)
    own_value, own_decay = (x[:, heads].unflatten(1, split) for x in (value, decay))
    return _Block(query[:, groups], key[:, groups], own_value, own_decay, initial, chunks)


# An operator of its own, so that selective checkpointing stores its results and nothing inside.
@torch.library.custom_op("spmdrl::state_space_rule", mutates_args=())
def _rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, state: Tensor | None, seqlens: list[int]
) -> tuple[Tensor, Tensor]:
    """Compute a few heads after the other, and store nothing: backward computes them again."""
    chunks = cut(tuple(seqlens), _CHUNK_TOKENS, key.device)
    out = torch.empty_like(value)
    final = value.new_empty(len(seqlens), value.shape[1], key.shape[2], value.shape[2])
    for parts in _blocks(key, value, chunks):
        of_heads, states = _block((query, key, value, decay), state, parts, chunks).out()
        out[:, parts[1]], final[:, parts[1]] = of_heads.flatten(1, 2), states.flatten(1, 2)
    return out, final


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.seqlens = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor, grad_final: Tensor) -> tuple[Tensor | None, ...]:
    *inputs, state = ctx.saved_tensors
    query, key, value, decay = inputs
    chunks = cut(tuple(ctx.seqlens), _CHUNK_TOKENS, grad.device)
    by_query, by_key = torch.zeros_like(query), torch.zeros_like(key)
    by_value, by_decay, by_state = map(torch.empty_like, (value, decay, grad_final))
    for parts in _blocks(key, value, chunks):
        groups, heads = parts
        block = _block(inputs, state, parts, chunks)
        split = (block.num_groups, -1)
        of_query, of_key, of_value, of_decay, of_state = block.backward(
            grad[:, heads].unflatten(1, split), grad_final[:, heads].unflatten(1, split)
        )
        by_query[:, groups] += of_query
        by_key[:, groups] += of_key
        by_value[:, heads], by_decay[:, heads] = of_value.flatten(1, 2), of_decay.flatten(1, 2)
        by_state[:, heads] = of_state.flatten(1, 2)
    return by_query, by_key, by_value, by_decay, None if state is None else by_state, None


_rule.register_autograd(_backward, setup_context=_save)
