"""The size of a refit's buckets."""

from __future__ import annotations

from spmdrl.config import RefitConfig

MOST_ON_DEVICE_BYTES = 2**30  # with which the weights of 4B parameters take 8 calls of the engine
HOST_BYTES = 2**27  # small, so that there are many: one is gathered while another core copies the one before
DEVICE_SHARE = 64  # of a device's memory, at most


def bucket_bytes(refit: RefitConfig, *, device_bytes: int | None) -> int:
    """Return the bytes of a bucket: what is set, else what suits the place where buckets lie.

    `device_bytes` is the memory of a rank's device, None on a CPU. The choice is a power of 2, so that devices that
    differ by a little choose the same.
    """
    if refit.bucket_bytes is not None:
        return refit.bucket_bytes
    if device_bytes is None or refit.transport == "shared_memory":
        return HOST_BYTES
    return min(MOST_ON_DEVICE_BYTES, 1 << (device_bytes // DEVICE_SHARE).bit_length() - 1)
