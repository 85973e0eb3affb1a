"""Operators with the bits of the engine: `true_on_policy`, and the ones whose result depends on a token's own input."""
