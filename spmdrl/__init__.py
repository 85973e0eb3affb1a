"""spmdrl: reinforcement-learning post-training of language models as one SPMD program."""

__version__ = "0.1.0"
