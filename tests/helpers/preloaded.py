"""Everything that a rank may import: the server that ranks are forked from imports it once, for all of them."""

from __future__ import annotations

import gc

import peft  # noqa: F401
import PIL.Image
import pytest  # noqa: F401
import reasoning_gym  # noqa: F401

import spmdrl.engine.torch.engine
import spmdrl.pairs
import spmdrl.report.curves
import spmdrl.report.tensorboard
import spmdrl.sft
import spmdrl.train  # noqa: F401
import tests.helpers.models  # noqa: F401

PIL.Image.preinit()
# What is here now stays; a rank that collects garbage, as every session does at its end, need not look at it again.
gc.collect()
gc.freeze()
