"""Bytes on paper: what a device must hold, phase by phase."""
