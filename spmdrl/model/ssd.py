"""The state space rule of Mamba 2 over packed sequences, each of which starts from its own state.

The rule keeps a matrix S for each head of each sequence. With each token S decays, the token's value is written at its
key, and its query reads the result; a group of heads shares keys and queries (B and C in the papers' words):

    S <- exp(decay) S + k v,    out = q S

Sequences are cut into chunks, as for gated delta nets (`chunks.py`). Inside a chunk the rule is attention without a
softmax, and what a chunk writes does not depend on the state before it; so all of that is computed for all chunks of
all sequences at once. From chunk to chunk, states are only multiplied by a number and added to. Sequences that begin
without a state, of whose last one nobody asks, have one for each chunk but the first; short ones have none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from spmdrl.model.chunks import Chunks, cut, of_spans, running_sums

_CHUNK_TOKENS = 48  # chosen on a CPU, for short and for long sequences
_CPU_BLOCK_BYTES = 2**25  # of one value of each token in the heads that are computed together
_CUDA_BLOCK_BYTES = 2**26  # enough to keep a device busy; some ten times as much exists at a time


def state_space_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    seqlens: list[int],
    state: Tensor | None = None,
    *,
    keeps_state: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return (out [T, H, P] float32, the states [S, H, N, P] float32 after each sequence's last token).

    Without `state`, and with `keeps_state` false, the second is empty, and less is computed.

    query and key are [T, G, N] and serve H / G neighbouring heads each; value is [T, H, P], and decay (a logarithm, at
    most 0) [T, H]. Sequences start from state [S, H, N, P]; None is 0. All is computed in float32.
    """
    query, key, value, decay = (x.float() for x in (query, key, value, decay))
    if max(seqlens) == 1:
        return _one_token_each(query, key, value, decay, state)
    return _rule(query, key, value, decay, state, seqlens, keeps_state or state is not None)


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
    side. Those in which heads differ in more than values are [B p, C, ...]. Of the B, `reading` are those that read a
    state and `writing` those that write one: all, or where nobody asks for the last states, those that have one before
    them, and in the same order those that have one after them.
    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor,
        state: Tensor | None,
        chunks: Chunks,
        keeps_state: bool,
    ):
        """Query and key are [T, g, D], value [T, g, p, P], decay [T, g, p] and state [S, g, p, D, P]."""
        self.keeps_state = keeps_state
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
        self.reading: slice = slice(0 if keeps_state else chunks.counts[0] * self.num_groups, None)
        self.writing: slice | Tensor = slice(None) if keeps_state else chunks.before(self.num_groups)
        self.written_values = self.v[self.writing] * self.to_end[self.writing]
        written = torch.bmm(self.k[self.writing].transpose(1, 2), self.written_values)
        self.states, self.before, self.final = self._scan(written, state)

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

    def _steps(self) -> list[slice]:
        """List the chunks that write, first ones first, by their places among these."""
        return [*self.chunks.steps(self.num_groups, first=not self.keeps_state)]

    def _zeros(self) -> Tensor:
        """States of the sequences that have one, longest first."""
        number = next(iter(self._steps()), slice(0, 0)).stop
        return self.v.new_zeros(number, self.k.shape[-1], self.v.shape[-1])

    def _scan(self, written: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the states that chunks read [B, D, p P], those before chunks that write, and those after sequences."""
        now = self._zeros()
        if state is not None:
            now = state[self.chunks.order].float().transpose(2, 3).flatten(3).flatten(0, 1)
        before = torch.empty_like(written)
        states = before if self.keeps_state else torch.empty_like(written)
        decay = self.of_chunk[self.writing]
        for step in self._steps():
            here = now[: step.stop - step.start]  # of the sequences that have such a chunk
            before[step] = here
            here.mul_(decay[step]).add_(written[step])
            if not self.keeps_state:  # the next chunk reads it
                states[step] = here
        return states, before, now

    def out(self) -> tuple[Tensor, Tensor]:
        """Return (out [T, g, p, P], final states [S, g, p, D, P])."""
        out = self._wide(torch.bmm(self.attention, self._narrow(self.v)))
        out[self.reading] += torch.bmm(self.q[self.reading], self.states).mul_(self.since_start[self.reading])
        return self._tokens(out), self._of_sequences(self.final)

    def _tokens(self, x: Tensor) -> Tensor:
        return self.chunks.tokens(x, self.num_groups).unflatten(-1, (self.heads, -1))

    def _of_sequences(self, states: Tensor) -> Tensor:
        if not self.keeps_state:
            return states.new_empty(0)
        by_group = states.unflatten(0, (-1, self.num_groups))[self.chunks.ranks]
        return by_group.unflatten(-1, (self.heads, -1)).transpose(2, 3)

    def backward(self, grad: Tensor, grad_final: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of query, key, value, decay and state for those of `out`."""
        by_out = self.chunks.lay_out(grad.flatten(2))
        reading, writing = self.reading, self.writing
        by_read = by_out[reading] * self.since_start[reading]
        by_states = torch.bmm(self.q[reading].transpose(1, 2), by_read)
        by_state = self._zeros()
        if self.keeps_state:
            by_state = grad_final[self.chunks.order].transpose(2, 3).flatten(3).flatten(0, 1)
        decay = self.of_chunk[writing]
        by_written, by_decay_of_chunk = torch.empty_like(by_states), torch.empty_like(decay)
        for step in reversed(self._steps()):
            after = by_state[: step.stop - step.start]
            if not self.keeps_state:
                after += by_states[step]
            by_written[step] = after
            by_decay_of_chunk[step] = (self.before[step] * after).sum(1, keepdim=True)
            after.mul_(decay[step])
            if self.keeps_state:
                after += by_states[step]

        # First through states: a token's decay is in what it and later ones read of the state, in what earlier ones
        # wrote, and in the state that is left.
        by_q, by_k, by_v = torch.zeros_like(self.q), torch.zeros_like(self.k), torch.zeros_like(self.v)
        by_decay = self.q.new_zeros(*self.q.shape[:2], self.heads)
        read = self._of_heads(torch.bmm(self.q[reading], self.states).mul_(by_read))
        by_decay[reading] = running_sums(read.flip(1)).flip(1)
        by_q[reading] = torch.bmm(by_read, self.states.transpose(1, 2))
        by_k[writing] = torch.bmm(self.written_values, by_written.transpose(1, 2))
        by_values = torch.bmm(self.k[writing], by_written).mul_(self.to_end[writing])
        by_v[writing] = by_values
        of_written = torch.zeros_like(by_decay[writing])
        of_written[:, 1:] = running_sums(self._of_heads(by_values * self.v[writing])[:, :-1])
        by_decay[writing] += of_written + self._of_heads(by_decay_of_chunk.mul_(decay))
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


def _block(
    inputs: Sequence[Tensor], state: Tensor | None, parts: tuple[slice, slice], chunks: Chunks, keeps_state: bool
) -> _Block:
    query, key, value, decay = inputs
    groups, heads = parts
    split = (groups.stop - groups.start, -1)
    initial = None if state is None else state[:, heads].unflatten(1, split)
    own_value, own_decay = (x[:, heads].unflatten(1, split) for x in (value, decay))
    return _Block(query[:, groups], key[:, groups], own_value, own_decay, initial, chunks, keeps_state)


# An operator of its own, so that selective checkpointing stores its results and nothing inside.
@torch.library.custom_op("spmdrl::state_space_rule", mutates_args=())
def _rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    state: Tensor | None,
    seqlens: list[int],
    keeps_state: bool,
) -> tuple[Tensor, Tensor]:
    """Compute a few heads after the other, and store nothing: backward computes them again."""
    chunks = cut(tuple(seqlens), _CHUNK_TOKENS, key.device)
    out = torch.empty_like(value)
    sizes = (len(seqlens), value.shape[1], key.shape[2], value.shape[2])
    final = value.new_empty(sizes if keeps_state else 0)
    for parts in _blocks(key, value, chunks):
        of_heads, states = _block((query, key, value, decay), state, parts, chunks, keeps_state).out()
        out[:, parts[1]] = of_heads.flatten(1, 2)
        if keeps_state:
            final[:, parts[1]] = states.flatten(1, 2)
    return out, final


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.seqlens, ctx.keeps_state = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor, grad_final: Tensor) -> tuple[Tensor | None, ...]:
    *inputs, state = ctx.saved_tensors
    query, key, value, decay = inputs
    chunks = cut(tuple(ctx.seqlens), _CHUNK_TOKENS, grad.device)
    by_query, by_key = torch.zeros_like(query), torch.zeros_like(key)
    by_value, by_decay, by_state = map(torch.empty_like, (value, decay, grad_final))
    for parts in _blocks(key, value, chunks):
        groups, heads = parts
        block = _block(inputs, state, parts, chunks, ctx.keeps_state)
        split = (block.num_groups, -1)
        by_final = grad_final[:, heads].unflatten(1, split) if ctx.keeps_state else grad_final
        of_query, of_key, of_value, of_decay, of_state = block.backward(grad[:, heads].unflatten(1, split), by_final)
        by_query[:, groups] += of_query
        by_key[:, groups] += of_key
        by_value[:, heads], by_decay[:, heads] = of_value.flatten(1, 2), of_decay.flatten(1, 2)
        if ctx.keeps_state:
            by_state[:, heads] = of_state.flatten(1, 2)
    return by_query, by_key, by_value, by_decay, None if state is None else by_state, None, None


_rule.register_autograd(_backward, setup_context=_save)
