"""Engines: requests in, responses out, and weights that can be replaced."""
