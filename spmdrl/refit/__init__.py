"""Refit: the policy's weights go to the engine, whole parameters at a time, bucket by bucket."""

from spmdrl.refit.refit import Refit

__all__ = ["Refit"]
