"""How a run stops, and what is left to read when it does: preemption, one cause for each failure, a watchdog."""
