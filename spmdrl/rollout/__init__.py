"""Collect the prompt groups of a step: with this rank's engine, from other ranks, or from files."""
