"""Low-rank adapters (LoRA): which weights get them, how they start, how they are trained and written."""
