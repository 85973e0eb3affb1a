"""Checkpoints: everything a run needs to continue, written in the background and verified before it is loaded."""

from spmdrl.checkpoint.manifest import newest_step, resolved, saved_steps
from spmdrl.checkpoint.resume import (
    ResumePoint,
    collector_state,
    find_resume_point,
    preview_resume_point,
    require_whole,
    restore,
)
from spmdrl.checkpoint.write import Saver, start_saver

__all__ = [
    "ResumePoint",
    "Saver",
    "collector_state",
    "find_resume_point",
    "newest_step",
    "preview_resume_point",
    "require_whole",
    "resolved",
    "restore",
    "saved_steps",
    "start_saver",
]
