"""Values of TOML on one line, as a setting on a command line or in a sentence has them."""

from __future__ import annotations

from typing import Any

import tomlkit


def inline(value: Any) -> str:
    """Write a value of TOML on one line; tables and lists in it too."""
    if isinstance(value, dict):
        return (
            "{ " + ", ".join(f"{tomlkit.key(key).as_string()} = {inline(inner)}" for key, inner in value.items()) + " }"
        )
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(inline, value)) + "]"
    return tomlkit.item(value).as_string()
