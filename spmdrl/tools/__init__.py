"""Programs besides the training loop, each run as `python -m spmdrl.tools.X`."""
