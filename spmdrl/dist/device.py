"""Which device a rank computes on, by the launcher's variables and what CUDA shows."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from spmdrl.types import UserError


def local_rank() -> int:
    """Return this process's index among its node's ranks, which is its device's too; needs no process group."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def num_local_ranks() -> int:
    """Return the number of ranks on this node; needs no process group."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def default_device_type() -> str:
    """The kind of device that ranks on this machine compute on: "cuda" where there is one, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def device_bytes() -> int | None:
    """Return the memory of this rank's CUDA device; None on a CPU."""
    return torch.cuda.get_device_properties(local_rank()).total_memory if torch.cuda.is_available() else None


def rank_device() -> torch.device:
    """Return this rank's CUDA device, the one with its index among the node's ranks, or the CPU where there is none.

    Raises UserError on every rank of a node that sees fewer devices than it has ranks, and where the node has devices
    that torch cannot use: such a run would otherwise go on on the CPU. Needs no process group.
    """
    if torch.cuda.is_available():
        return torch.device("cuda", _index_of_device())
    if torch.version.cuda is not None and _device_files() and not _hides_devices():
        if (mask := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
            raise UserError(
                f"this machine has NVIDIA devices ({', '.join(map(str, _device_files()))}), and CUDA_VISIBLE_DEVICES="
                f"{mask} names none that torch can use ({_what_cuda_says()}): unset it, name one that is there, or train "
                'on the CPU with CUDA_VISIBLE_DEVICES=""'
            )
        raise UserError(
            f"this machine has NVIDIA devices ({', '.join(map(str, _device_files()))}), but torch {torch.__version__}, "
            f"built for CUDA {torch.version.cuda}, can use none of them: {_what_cuda_says()}; install a driver that "
            'fits, or train on the CPU with the environment variable CUDA_VISIBLE_DEVICES=""'
        )
    return torch.device("cpu")


def _index_of_device() -> int:
    place, visible = local_rank(), torch.cuda.device_count()
    if (wanted := max(place + 1, num_local_ranks())) > visible:
        mask = os.environ.get("CUDA_VISIBLE_DEVICES")
        seen = "" if mask is None else f" (CUDA_VISIBLE_DEVICES={mask})"
        raise UserError(
            f"{wanted} ranks were started on this machine, and each needs a CUDA device of its own, but this one sees "
            f"only {visible}{seen}: start as many ranks as there are devices, and let every rank see all of them; it "
            "takes the one with its own index"
        )
    return place


def _device_files() -> list[Path]:
    """The NVIDIA devices that this process may open; a container that was given none has no such files."""
    return sorted(Path("/dev").glob("nvidia[0-9]*"))


def _hides_devices() -> bool:
    """True when the user has hidden every device from CUDA on purpose."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "all").split(",")[0].strip() in ("", "-1")


def _what_cuda_says() -> str:
    """The first sentence of CUDA's reason, such as that the driver is too old."""
    try:
        torch.cuda.init()
    except Exception as error:
        return " ".join(str(error).split()).partition(". ")[0]
    return "it finds no device"
