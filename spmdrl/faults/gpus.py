"""The GPUs of this machine, counted without torch, which takes seconds to import."""

from __future__ import annotations

import os
import re
import shutil
import subprocess


def count_gpus() -> int:
    """Return the number of GPUs that processes of this machine may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return 0 if visible.startswith("-1") or not visible else len(visible.split(","))
    return gpus_of_driver()


def gpus_of_driver() -> int:
    """Return the number of GPUs that the driver shows, 0 without a driver."""
    if shutil.which("nvidia-smi") is None:
        return 0
    shown = subprocess.run(["nvidia-smi", "--list-gpus"], check=False, capture_output=True, text=True).stdout
    return len(re.findall("^GPU", shown, re.MULTILINE))
