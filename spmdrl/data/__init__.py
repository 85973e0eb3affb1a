"""Prompts: a pure function of the run's seed and of their place in the stream."""
