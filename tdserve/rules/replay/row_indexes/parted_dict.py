"""A dictionary of very many numbers that never takes long to grow."""

from __future__ import annotations

_ENTRIES_OF_PART = 512
"""Average of a full dictionary. Parts fill at nearly the same speed: the smaller they are, the less often many of them
grow at about the same time."""


class PartedDict:
    """A dictionary of integers in parts. One that outgrows its room is copied, which takes long for millions of
    entries; here each part has its own moment for that. Nothing in it is looked at by the garbage collector.

    Args:
        max_entries: Most entries that there can be.
    """

    def __init__(self, max_entries: int) -> None:
        num_parts = 1 << (max_entries // _ENTRIES_OF_PART).bit_length()
        self._parts: list[dict[int, int]] = [{} for _ in range(num_parts)]
        self._mask = num_parts - 1

    def find_part(self, key: int) -> dict[int, int]:
        """Returns the part that has the entry of a key, if there is one; a new entry goes there too."""
        # The hash of a tuple is mixed, that of a number is not; a dictionary uses the low bits first.
        return self._parts[hash((key,)) >> 32 & self._mask]

    def clear(self) -> None:
        """Removes all entries."""
        for part in self._parts:
            part.clear()
