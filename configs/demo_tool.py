"""The tool of configs/demo-tool.toml: a table of colours, which a policy cannot know without asking."""

import hashlib

COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "black", "white")


def lookup(key: str) -> str:
    """Look up the colour of a key.

    Args:
        key: Two letters and a digit.
    """
    return COLOURS[hashlib.sha256(key.encode()).digest()[0] % len(COLOURS)]
