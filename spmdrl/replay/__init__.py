"""Recording steps, so that they can be computed again and compared."""
