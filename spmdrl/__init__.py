"""spmdrl: reinforcement-learning post-training of language models as one SPMD program."""

import importlib
from typing import Any

__version__ = "0.1.0"

_FACE = {
    "Callback": "spmdrl.run",
    "Loop": "spmdrl.trainer",
    "StopRequested": "spmdrl.types",
    "Trainer": "spmdrl.trainer",
    "UserError": "spmdrl.types",
    "load_config": "spmdrl.trainer",
}


def __getattr__(name: str) -> Any:
    """Import a part of the Python face; `import spmdrl` alone imports nothing of it."""
    if name not in _FACE:
        raise AttributeError(f"module 'spmdrl' has no attribute {name!r}")
    return getattr(importlib.import_module(_FACE[name]), name)
