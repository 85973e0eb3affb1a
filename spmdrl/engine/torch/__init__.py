"""The torch engine: continuous batching with a cache, on the transformers model itself, in the rank's process."""
