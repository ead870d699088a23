"""What of each kind an operation refuses, by a typed error that says why; and the little that comes otherwise."""

from __future__ import annotations

import re
from typing import NamedTuple

import tdserve


class Note(NamedTuple):
    """Why a kind does not come out equal.

    Attributes:
        error: What is raised; AssertionError: it comes, and it differs.
        pattern: Found in its message, which names the key or the reason.
        text: For the guide.
    """

    error: type[Exception]
    pattern: str
    text: str

    def accepts(self, error: Exception) -> bool:
        """Whether this is what was announced."""
        return isinstance(error, self.error) and re.search(self.pattern, str(error)) is not None


NOTES: dict[str, Note] = {
    "shared": Note(
        tdserve.NotSupportedError,
        "mapping store",
        "as the column says",
    ),
    "structure": Note(
        tdserve.SpecMismatchError,
        r"key .*: expected .*, got ",
        "All rows of a table have the structure of `like=`. A row with another key, or with another kind of value at a"
        " key, is refused with a `SpecMismatchError` that names the key. A tensordict store accepts such rows.",
    ),
    "unbatched": Note(
        tdserve.NotSupportedError,
        "an UnbatchedTensor at key 'table'",
        "It belongs to no row, so it is refused with an error that names it; give it a store of its own.",
    ),
}
"""By the word that ``REFUSED`` has for them."""

_TABLES = ("replay", "queue")

REFUSED: dict[str, dict[str, str]] = {
    kind: dict.fromkeys(_TABLES, note)
    for note, kinds in {
        "structure": (
            "lazy stack of different keys",
            "lazy stack of different dtypes and kinds",
            "lazy stack in a tensordict",
            "lazy stack along the first of two batch dimensions, of different keys",
            "locked lazy stack of different keys",
            "lazy stack along dimension 1 of members of every kind in a tensordict",
            "lazy stack along the second of two batch dimensions, of members of every kind",
            "lazy stack along the first of two batch dimensions, of members of every kind",
            "lazy stack of instances that hold instances",
            "LazyStackedTensorDict of instances along the first of two batch dimensions",
            "lazy stack of TypedTensorDicts along the first of two batch dimensions",
        ),
        "unbatched": ("UnbatchedTensor", "UnbatchedTensor in a lazy stack"),
    }.items()
    for kind in kinds
}
"""By kind and operation, the word of its note."""


def note_of(kind: str, operation: str) -> Note | None:
    """Why an operation of a kind does not come out equal; None where it does."""
    word = REFUSED.get(kind, {}).get(operation)
    return None if word is None else NOTES[word]
