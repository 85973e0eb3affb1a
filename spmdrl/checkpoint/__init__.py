"""Checkpoints: everything a run needs to go on, written in the background and checked before it is loaded."""

from spmdrl.checkpoint.changes import resolved
from spmdrl.checkpoint.places import newest_step, saved_steps
from spmdrl.checkpoint.restore import collector_state, restore
from spmdrl.checkpoint.resume import Origin, find_origin, foresee_origin, require_whole
from spmdrl.checkpoint.write import Saver, save

__all__ = [
    "Origin",
    "Saver",
    "collector_state",
    "find_origin",
    "foresee_origin",
    "newest_step",
    "require_whole",
    "resolved",
    "restore",
    "save",
    "saved_steps",
]
