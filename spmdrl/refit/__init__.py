"""Refit: sending the policy's weights to the engine, as whole parameters in buckets.

refit     one refit, and its verification: for each bucket gather, load, wait
gather    shards to whole weights, in the memory of a bucket
bucket    which weights share a bucket, and what an engine does with one; `engine/` does it
digest    digests of weights, by which a refit is verified
"""
