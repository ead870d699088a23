"""The operations that a kind refuses, each with a typed error that gives the reason, and the few that return something
different."""

from __future__ import annotations

import re
from typing import NamedTuple

import tdserve


class Note(NamedTuple):
    """Why a read differs from what was written.

    Attributes:
        error: The error that is raised; AssertionError if the result differs instead.
        pattern: Occurs in the message, which names the key or the reason.
        text: Text for the guide.
    """

    error: type[Exception]
    pattern: str
    text: str

    def accepts(self, error: Exception) -> bool:
        """Returns whether this is the announced error."""
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
"""The notes by the word that ``REFUSED`` uses for them."""

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
"""The word of the note, by kind and operation."""


def note_of(kind: str, operation: str) -> Note | None:
    """Returns why the result of an operation on a kind differs; None if it is equal."""
    word = REFUSED.get(kind, {}).get(operation)
    return None if word is None else NOTES[word]
