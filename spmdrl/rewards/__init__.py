"""Rewards: text in, float out. One file per verifier, run in processes that can be killed.

Only `client` and `pool` import torch or the rest of spmdrl: reward processes start without them.
"""
