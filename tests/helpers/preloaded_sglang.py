"""What a rank with an engine, and a scheduler of SGLang, import: the server that they are forked from has it all."""

from __future__ import annotations

import gc
from importlib import import_module

import tests.helpers.preloaded  # noqa: F401
from spmdrl.engine.sglang.process import import_sglang

gc.disable()
import_sglang()
import_module("spmdrl.engine.sglang.engine")
import_module("spmdrl.engine.sglang.scheduler")  # which needs what `import_sglang` has set up

gc.collect()
gc.freeze()
gc.enable()
