"""Corrections and what is measured of the mismatch are on a device what they are on the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from spmdrl.algo.metrics import Metrics, fetched
from spmdrl.config import CorrectionConfig, LossConfig
from spmdrl.learn.correction import effective_fraction, worst_of
from spmdrl.learn.objective import PolicyObjective
from spmdrl.model.policy import TokenLogprobs
from spmdrl.types import MicroBatch
from tests.helpers.corrections import CORRECTIONS, batch, corrected, random_columns


def _objective(
    micro_batch: MicroBatch, now: Tensor, correction: CorrectionConfig, device: torch.device
) -> tuple[Tensor, Tensor, Metrics]:
    """Loss, gradient and the metrics that look at tokens one by one."""
    micro_batch, logprobs = micro_batch.to(device), now.to(device, copy=True).requires_grad_()
    scores = TokenLogprobs(logprobs, torch.zeros_like(logprobs))
    result = PolicyObjective(LossConfig(), correction=correction)(scores, micro_batch)
    result.loss_sum.backward()
    assert logprobs.grad is not None
    parts = {name: worst_of(values, micro_batch) for name, values in result.worst.items()}
    parts |= {name: effective_fraction(*weights) for name, weights in result.weights.items()}
    (measured,) = fetched([parts])
    return result.loss_sum.detach().cpu(), logprobs.grad.cpu(), measured


@pytest.mark.claim(
    "Training on one device", "Corrections of the mismatch, and what is measured of it, are those of the host."
)
@pytest.mark.parametrize("settings", CORRECTIONS, ids=str)
def test_a_correction_on_a_device_is_that_on_the_host(settings: dict[str, Any]) -> None:
    (micro_batch, now), correction = batch(random_columns(), [8])[0], CorrectionConfig(**settings)
    (micro_batch,) = corrected([micro_batch], correction)
    host, device = (_objective(micro_batch, now, correction, torch.device(kind)) for kind in ("cpu", "cuda"))
    torch.testing.assert_close(device[:2], host[:2], rtol=1e-6, atol=1e-7)
    for name, metric in host[2].items():
        assert device[2][name].value() == pytest.approx(metric.value())
    assert device[2]["mismatch/max_abs_nats"] == host[2]["mismatch/max_abs_nats"]
