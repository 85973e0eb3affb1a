"""Prompts: each is a pure function of the run's seed and of its index in the stream."""
