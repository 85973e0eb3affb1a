"""Refit: sending the policy's weights to the engine, as whole parameters in buckets."""
