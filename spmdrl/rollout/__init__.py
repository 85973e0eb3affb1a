"""Collect the prompt groups of a step: with this rank's engine, from other ranks, or from files.

sampler, collect, part  choose prompt groups and engines, by tickets.py and clock.py; start.py makes the sampler
scheduler               runs episodes on one engine: requests in, responses out
episode, group          the turns of an episode; the episodes of a prompt
env_context             the environments of episodes, and what these show
sample                  sampling settings
serve, remote           engines on ranks of their own
files, codec            rollouts as files
"""
