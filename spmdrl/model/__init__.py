"""The policy as a module: loading, sharding, packed attention, log-probabilities, names."""

from spmdrl.model.machine import place_torchs_cache

place_torchs_cache()  # before anything here imports transformers, which imports torch's compiler
