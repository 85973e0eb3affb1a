"""The torch engine: continuous batching with a cache, on the transformers model itself, in the rank's process.

engine      requests in, responses out; weights and adapters of a refit
scheduler   which requests wait and which run, and the rows cached as prefixes of later ones
runner      forward passes: prefill, extend, decode
cache       keys, values and states of the rows that run, and features of images
adapters    the versions of adapters that rows are computed with
sampling    tokens of logits
"""
