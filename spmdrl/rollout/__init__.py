"""Sampling: the engine protocol, the embedded engine, and how prompt groups are drawn."""
