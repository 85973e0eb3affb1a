"""Give every process whose PYTHONPATH has this folder an emulated CUDA device, from its first import of torch on."""

import importlib.util
import sys
from pathlib import Path

_FOLDER = Path(__file__).resolve().parents[1]
_SPEC = importlib.util.spec_from_file_location(
    "emulated_cuda", _FOLDER / "__init__.py", submodule_search_locations=[str(_FOLDER)]
)
_MODULE = importlib.util.module_from_spec(_SPEC)
sys.modules["emulated_cuda"] = _MODULE
_SPEC.loader.exec_module(_MODULE)
_MODULE.wait_for_torch()
