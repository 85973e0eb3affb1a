"""Refit: the policy's weights go to the engine, whole parameters at a time, bucket by bucket."""
