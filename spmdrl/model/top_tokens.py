"""The K tokens that a model finds most probable, by tiles of logits, never [T, V]."""

from __future__ import annotations

import torch
from torch import Tensor

from spmdrl.model import logits_tile
from spmdrl.model.logprobs import FAST_HEAD, Head, HeadOptions, merged_over, over_slabs, part_of, slices_of
from spmdrl.types import TopTokens


@torch.no_grad()
def top_tokens(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, options: HeadOptions, head: Head = FAST_HEAD, *, k: int
) -> TopTokens:
    """Find the k most probable next tokens after each of the N hidden states.

    The arguments are those of `next_token_logprobs`, and with these the log-probabilities have the bits of
    `next_token_logprobs_of`, but for a soft cap's rounding. k is at most V.
    """
    scale, chunk, start = options.scale, max(1, min(options.chunk, len(hidden))), options.start(weight)
    slabs, tile = head.slabs(len(weight), chunk, hidden.device.type), head.tile_on(hidden.device.type)
    summary = torch.empty(4, len(hidden), dtype=torch.float32, device=hidden.device)
    # z and token, [2, N, k]: float64 has both without loss.
    best = torch.full((2, len(hidden), k), -torch.inf, dtype=torch.float64, device=hidden.device)
    for rows in slices_of(len(hidden), chunk):
        outside = torch.full((rows.stop - rows.start,), -1, device=hidden.device)  # no target

        def extended(before: Tensor | None, slab: slice, rows: slice = rows, outside: Tensor = outside) -> Tensor:
            logits = head.linear(hidden[rows], weight[slab], part_of(bias, slab))
            values, columns = logits.topk(min(k, logits.shape[1]))
            z = scale.z(values.float())
            best[:, rows] = _better(best[:, rows], torch.stack([z.double(), (columns + slab.start + start).double()]))
            return tile.summary(logits, outside, 0, scale, before)

        summary[:, rows] = over_slabs(slabs, extended)
    if options.vocabulary is not None:
        summary = merged_over(options.vocabulary, logits_tile.merged, summary)
        best = merged_over(options.vocabulary, _better, best)
    z, token_ids = best[0].float(), best[1].long()
    return TopTokens(token_ids, (z - summary[0, :, None]) - summary[1, :, None].log())


def _better(one: Tensor, other: Tensor) -> Tensor:
    """Return the best of both, as many as in the first: [2, n, k] and [2, n, m] give [2, n, k]."""
    both = torch.cat([one, other], -1)
    order = both[0].topk(one.shape[2]).indices
    return both.gather(-1, order.expand(2, *order.shape))
