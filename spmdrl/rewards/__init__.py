"""Rewards: text in, float out. One file per verifier, run in processes that can be killed.

Nothing here but `scorer` imports torch, or the rest of spmdrl: reward processes start without it.
"""
