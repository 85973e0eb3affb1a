"""Rewards: text in, float out, computed by verifiers in processes that can be killed.

Only `client` and `pool` import torch or the rest of spmdrl: reward processes start without them.
"""
