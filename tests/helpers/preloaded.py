"""Everything that a rank may import: the server that ranks are forked from imports it once, for all of them."""

from __future__ import annotations

import gc
import os
from importlib import import_module

import torch

MODULES = (
    "PIL.Image",
    "numpy.ctypeslib",
    "pydantic.dataclasses",
    "pytest",
    "reasoning_gym",
    "spmdrl.cpu.dense_decoder",
    "spmdrl.engine.torch.engine",
    "spmdrl.pairs",
    "spmdrl.report.curves",
    "spmdrl.report.tensorboard",
    "spmdrl.sft",
    "spmdrl.train",
    "tests.helpers.models",
    "torch.utils.serialization.config",
)
gc.disable()  # what is imported is no garbage
# Of a process that has begun CUDA, none that is forked can use it. torch begins it to count devices unless it may ask
# NVML; bitsandbytes, which peft imports where it is installed, begins it always.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
has_cuda = torch.version.cuda is not None
for module in MODULES if has_cuda else (*MODULES, "peft"):
    import_module(module)
assert not (has_cuda and torch.cuda.is_initialized()), "ranks that are forked from here cannot use CUDA"

import_module("PIL.Image").preinit()
# The first call makes those of all types.
import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("qwen3")
# What is here now stays; a rank that collects garbage, as every session does at its end, need not look at it again.
gc.collect()
gc.freeze()
gc.enable()
