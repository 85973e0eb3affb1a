"""Text of others as it may be shown: nothing in it can steer a terminal or turn the words around it."""

from __future__ import annotations

import unicodedata

_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}  # controls, formats such as bidirectional ones, halves of pairs


def visible(text: str) -> str:
    """Return the text in one line, with every character that is not seen as an escape, such as `\\x1b` or `\\u202e`."""
    return "".join(
        _escaped(character) if unicodedata.category(character) in _HIDDEN else character for character in text
    )


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
