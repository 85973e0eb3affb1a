"""The policy as a module: loading, sharding, packed attention, log-probabilities, names."""
