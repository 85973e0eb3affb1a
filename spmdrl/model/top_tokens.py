"""The K tokens that a model finds most probable, by tiles of logits, never [T, V]."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from spmdrl.model import logits_tile
from spmdrl.model.logprobs import FAST_HEAD, Head, merged_over, over_slabs, part_of, slices_of
from spmdrl.types import TopTokens


@torch.no_grad()
def top_tokens(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    k: int,
    temperature: float,
    chunk: int,
    softcap: float | None = None,
    vocabulary: DeviceMesh | None = None,
    head: Head = FAST_HEAD,
) -> TopTokens:
    """Find the k most probable next tokens after each of the N hidden states.

    The arguments are those of `next_token_logprobs`, and with these the log-probabilities have the bits of
    `next_token_logprobs_of`, but for a soft cap's rounding. k is at most V.
    """
    chunk = max(1, min(chunk, len(hidden)))
    slabs, tile = head.slabs(len(weight), chunk, hidden.device.type), head.tile_on(hidden.device.type)
    start = 0 if vocabulary is None else vocabulary.get_local_rank() * len(weight)
    summary = torch.empty(4, len(hidden), dtype=torch.float32, device=hidden.device)
    # z and token, [2, N, k]: float64 has both without loss.
    best = torch.full((2, len(hidden), k), -torch.inf, dtype=torch.float64, device=hidden.device)
    for rows in slices_of(len(hidden), chunk):
        outside = torch.full((rows.stop - rows.start,), -1, device=hidden.device)  # no target

        def extended(before: Tensor | None, slab: slice, rows: slice = rows, outside: Tensor = outside) -> Tensor:
            logits = head.linear(hidden[rows], weight[slab], part_of(bias, slab))
            values, columns = logits.topk(min(k, logits.shape[1]))
            z = logits_tile.scaled(values.float(), temperature, softcap)
            best[:, rows] = _better(best[:, rows], torch.stack([z.double(), (columns + slab.start + start).double()]))
            return tile.summary(logits, outside, 0, temperature=temperature, softcap=softcap, before=before)

        summary[:, rows] = over_slabs(slabs, extended)
    if vocabulary is not None:
        summary = merged_over(vocabulary, logits_tile.merged, summary)
        best = merged_over(vocabulary, _better, best)
    z, token_ids = best[0].float(), best[1].long()
    return TopTokens(token_ids, (z - summary[0, :, None]) - summary[1, :, None].log())


def _better(one: Tensor, other: Tensor) -> Tensor:
    """Return the best of both, as many as in the first: [2, n, k] and [2, n, m] give [2, n, k]."""
    both = torch.cat([one, other], -1)
    order = both[0].topk(one.shape[2]).indices
    return both.gather(-1, order.expand(2, *order.shape))
