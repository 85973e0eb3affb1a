"""Stopping, failing and hanging: a run that is preempted saves itself, and one that fails reports one cause."""
