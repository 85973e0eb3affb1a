"""The gated delta rule of packed sequences, each of which starts from its own state.

The rule keeps a matrix S for each head of each sequence. With each token S decays, what the token's key finds in S is
corrected towards the token's value, and its query reads the result:

    S <- exp(decay) S,    S <- S + beta k (v - k S),    out = q S

Sequences are cut into chunks. Within a chunk, corrections are the solution of a triangular system, and everything but
the state before the chunk is known for all chunks of all sequences at once. The states then go from chunk to chunk: the
first chunks of all sequences are one batch, their second chunks another, and so on. There are as many steps as the
longest sequence has chunks, however many sequences there are and whatever their lengths.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from spmdrl.model.chunks import Chunks, cut, dot, of_spans, running_sums

# Longer chunks read the states, as large as the square of a head, less often, but compute more inside. Measured on a
# CPU by benchmarks/gated_delta.py.
_CHUNK_TOKENS, _CHUNK_TOKENS_OF_LARGE_HEADS, _LARGE_HEAD = 16, 32, 128
_CPU_BLOCK_BYTES = 2**20  # of one value of each token in the heads that are computed together: what fits a core's cache
_CUDA_BLOCK_BYTES = 2**26  # enough to keep a device busy; some twenty-five times as much exists at a time
_EPS = 1e-6


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    seqlens: list[int],
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (out [T, H, Dv], the states [S, H, Dk, Dv] float32 after each sequence's last token).

    query and key are [T, K, Dk] and serve H / K value heads each; they are normalized here. value is [T, H, Dv]. beta
    (0 to 1) and decay (a logarithm, at most 0) are [T, H]. Sequences start from state [S, H, Dk, Dv]; None is 0. All is
    computed in float32.
    """
    if max(seqlens) == 1:
        return _one_token_each(query, key, value, decay, beta, state)
    return _rule(query, key, value, decay.float(), beta, state, seqlens)


def _one_token_each(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute the rule token by token. An engine's decode steps wait for memory, so states are read and written once:
    q and k read them before the correction, of which q then reads q k^T."""
    groups = value.shape[1] // key.shape[1]
    q, k = (_unit(x.float())[0].repeat_interleave(groups, dim=1).unsqueeze(-2) for x in (query, key))  # [S, H, 1, Dk]
    if state is None:
        state = q.new_zeros(*q.shape[:2], q.shape[-1], value.shape[-1])
    retained, beta = decay.float().exp()[..., None, None], beta.float()[..., None, None]
    by_q, by_k = (torch.cat((q, k), dim=-2) @ state * retained).split(1, dim=-2)
    correction = beta * (value.float().unsqueeze(-2) - by_k)  # [S, H, 1, Dv]
    out = (by_q + (q * k).sum(-1, keepdim=True) * correction) * q.shape[-1] ** -0.5
    return out.squeeze(-2).to(value.dtype), (state * retained).addcmul_(k.transpose(-1, -2), correction)


def _unit(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x [..., D] with length 1, and what it was multiplied with."""
    factor = torch.rsqrt((x * x).sum(-1, keepdim=True) + _EPS)
    return x * factor, factor


def _cut(seqlens: list[int], key: Tensor) -> Chunks:
    most = _CHUNK_TOKENS_OF_LARGE_HEADS if key.shape[-1] >= _LARGE_HEAD else _CHUNK_TOKENS
    return cut(tuple(seqlens), most, key.device)


# --- heads that are computed together --------------------------------------------------------------------------------


class _Block:
    """The values that forward and backward share, for g key heads and their h value heads.

    Its tensors are [B, C, ...] for B = N h chunks of heads; C is the chunk's length.
    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor,
        beta: Tensor,
        state: Tensor | None,
        chunks: Chunks,
    ) -> None:
        self.chunks, self.num_heads, self.groups = chunks, value.shape[1], value.shape[1] // key.shape[1]
        self.scale = query.shape[-1] ** -0.5
        self.q, self.q_factor = self._unit_rows(query)
        self.k, self.k_factor = self._unit_rows(key)
        self.v = chunks.lay_out(value)
        self.beta = chunks.lay_out(beta.unsqueeze(-1))  # [B, C, 1], as all that follow
        total = running_sums(chunks.lay_out(decay.unsqueeze(-1)))
        last = total[:, -1:]
        self.since_start, self.to_end, self.of_chunk = total.exp(), (last - total).exp(), last.exp()
        later = torch.ones(chunks.size, chunks.size, dtype=torch.bool, device=total.device).triu_(1)
        # Masked before exp: decay from later tokens would be growth, and may overflow.
        self.between = (total - total.transpose(1, 2)).masked_fill_(later, -torch.inf).exp_()  # [B, C, C]
        # What each token's correction takes from those of earlier tokens; the diagonal is 1 and is not read.
        self.system = torch.bmm(self.k, self.k.transpose(1, 2)).mul_(self.between).mul_(self.beta)
        identity = torch.eye(chunks.size, device=total.device)
        self.inverse = torch.linalg.solve_triangular(self.system, identity, upper=False, unitriangular=True)
        self.attention = torch.bmm(self.q, self.k.transpose(1, 2)).mul_(self.between)
        self.q_reading = self.q * self.since_start
        self.k_writing = self.k * self.to_end
        self.k_reading = torch.bmm(self.inverse, self.k * (self.beta * self.since_start))
        self.corrections = torch.bmm(self.inverse, self.v * self.beta)  # as if states before chunks were 0, until then:
        self.states, self.final = self._scan(state)

    def _unit_rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Lay out the key heads x [T, g, D], repeated for their value heads, with length 1; and their factors."""
        unit, factor = _unit(self.chunks.lay_out(x.repeat_interleave(self.groups, dim=1)))
        return unit, factor

    def _scan(self, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the states before each chunk and after each sequence, longest first; complete the corrections."""
        shape = (self.k.shape[-1], self.v.shape[-1])
        if state is None:
            now = self.v.new_zeros(self.chunks.counts[0] * self.num_heads, *shape)
        else:
            now = state[self.chunks.order].float().flatten(0, 1)
        states = self.v.new_empty(len(self.v), *shape)
        for step in self.chunks.steps(self.num_heads):
            before = now[: step.stop - step.start]  # of the sequences that have such a chunk
            states[step] = before
            corrections = self.corrections[step].baddbmm_(self.k_reading[step], before, alpha=-1)
            before.mul_(self.of_chunk[step]).baddbmm_(self.k_writing[step].transpose(1, 2), corrections)
        return states, now

    def out(self) -> tuple[Tensor, Tensor]:
        """Return (out [T, h, Dv], final states [S, h, Dk, Dv])."""
        read = torch.bmm(self.attention, self.corrections)
        out = read.baddbmm_(self.q_reading, self.states, beta=self.scale, alpha=self.scale)
        return self.chunks.tokens(out, self.num_heads), self._of_sequences(self.final)

    def _of_sequences(self, states: Tensor) -> Tensor:
        return states.unflatten(0, (-1, self.num_heads))[self.chunks.ranks]

    def backward(self, grad: Tensor, grad_final: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of query, key, value, decay, beta and state for those of `out`."""
        by_out = self.chunks.lay_out(grad).mul_(self.scale)
        by_state = grad_final[self.chunks.order].flatten(0, 1)
        by_corrections = torch.bmm(self.attention.transpose(1, 2), by_out)
        by_k_writing, by_decay_of_chunk = torch.empty_like(self.k), torch.empty_like(self.of_chunk)
        for step in reversed([*self.chunks.steps(self.num_heads)]):
            after = by_state[: step.stop - step.start]
            corrections, states = self.corrections[step], self.states[step]
            by_corrections[step].baddbmm_(self.k_writing[step], after)
            by_k_writing[step] = torch.bmm(corrections, after.transpose(1, 2))
            by_decay_of_chunk[step] = torch.bmm(states.flatten(1).unsqueeze(1), after.flatten(1).unsqueeze(2))
            after.mul_(self.of_chunk[step]).baddbmm_(self.q_reading[step].transpose(1, 2), by_out[step])
            after.baddbmm_(self.k_reading[step].transpose(1, 2), by_corrections[step], alpha=-1)

        by_solved = torch.bmm(self.inverse.transpose(1, 2), by_corrections)
        states, corrections, k = self.states.transpose(1, 2), self.corrections.transpose(1, 2), self.k
        by_attention, by_system = torch.bmm(by_out, corrections), torch.bmm(by_solved, corrections).neg_()
        by_decay = of_spans(by_attention * self.attention + by_system * self.system)
        by_attention.mul_(self.between)
        by_system.mul_(self.between).tril_(-1)
        # First what comes from the state before the chunk, and what is written into the state after it.
        by_q = torch.bmm(by_out, states).mul_(self.since_start)
        by_k_read = torch.bmm(by_solved, states).mul_(-self.since_start)  # but for the factor beta
        by_k_written = by_k_writing.mul_(self.to_end)
        read = dot(by_q, self.q).add_(dot(by_k_read, k).mul_(self.beta))
        written = dot(by_k_written, k)
        # A token's decay is in what it and later ones read of the state, in what earlier ones wrote, and in the state
        # that is left.
        by_decay += running_sums(read.flip(1)).flip(1)
        by_decay[:, 1:] += running_sums(written[:, :-1])
        by_decay += by_decay_of_chunk.mul_(self.of_chunk)
        # Then what tokens of the chunk have from each other.
        by_q.baddbmm_(by_attention, k)
        by_k_read.baddbmm_(by_system, k)
        by_beta = dot(by_solved, self.v).add_(dot(by_k_read, k))
        by_k_written.baddbmm_(by_attention.transpose(1, 2), self.q)
        by_k_written.baddbmm_(by_system.mul_(self.beta).transpose(1, 2), k)
        by_k = by_k_read.mul_(self.beta).add_(by_k_written)
        return (
            self._by_key_heads(by_q, self.q, self.q_factor),
            self._by_key_heads(by_k, k, self.k_factor),
            self.chunks.tokens(by_solved * self.beta, self.num_heads),
            self.chunks.tokens(by_decay, self.num_heads).squeeze(-1),
            self.chunks.tokens(by_beta, self.num_heads).squeeze(-1),
            self._of_sequences(by_state),
        )

    def _by_key_heads(self, grad: Tensor, unit: Tensor, factor: Tensor) -> Tensor:
        """Map the gradient of normalized rows [B, C, D] to that of key heads [T, g, D]."""
        grad = (grad - unit * dot(grad, unit)).mul_(factor)
        return self.chunks.tokens(grad, self.num_heads).unflatten(1, (-1, self.groups)).sum(2)


def _blocks(key: Tensor, value: Tensor, chunks: Chunks) -> Iterator[tuple[slice, slice]]:
    """Yield (key heads, value heads) that are computed together."""
    num_heads, groups = key.shape[1], value.shape[1] // key.shape[1]
    head_bytes = sum(chunks.counts) * chunks.size * groups * value.shape[-1] * 4
    together = max(1, (_CUDA_BLOCK_BYTES if value.is_cuda else _CPU_BLOCK_BYTES) // head_bytes)
    for first in range(0, num_heads, together):
        end = min(num_heads, first + together)
        yield slice(first, end), slice(first * groups, end * groups)


def _block(inputs: Sequence[Tensor], state: Tensor | None, heads: tuple[slice, slice], chunks: Chunks) -> _Block:
    query, key, value, decay, beta = inputs
    shared, own = heads
    initial = None if state is None else state[:, own]
    return _Block(query[:, shared], key[:, shared], value[:, own], decay[:, own], beta[:, own], initial, chunks)


# An operator of its own, so that selective checkpointing keeps its results and nothing inside.
@torch.library.custom_op("spmdrl::gated_delta_rule", mutates_args=())
def _rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor | None, seqlens: list[int]
) -> tuple[Tensor, Tensor]:
    """Compute a few heads after the other, and keep nothing: backward computes them again."""
    chunks = _cut(seqlens, key)
    out = torch.empty_like(value)
    final = torch.empty(
        len(seqlens), value.shape[1], key.shape[2], value.shape[2], dtype=torch.float32, device=value.device
    )
    for heads in _blocks(key, value, chunks):
        block = _block((query, key, value, decay, beta), state, heads, chunks)
        out[:, heads[1]], final[:, heads[1]] = block.out()
    return out, final


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.seqlens = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor, grad_final: Tensor) -> tuple[Tensor | None, ...]:
    *inputs, state = ctx.saved_tensors
    chunks = _cut(ctx.seqlens, inputs[1])
    grads = [torch.empty_like(x) for x in inputs]
    by_state = torch.empty_like(grad_final)
    for heads in _blocks(inputs[1], inputs[2], chunks):
        shared, own = heads
        block = _block(inputs, state, heads, chunks)
        *parts, by_state[:, own] = block.backward(grad[:, own], grad_final[:, own])
        for whole, part, its_heads in zip(grads, parts, (shared, shared, own, own, own), strict=True):
            whole[:, its_heads] = part
    return *grads, None if state is None else by_state, None


_rule.register_autograd(_backward, setup_context=_keep)
