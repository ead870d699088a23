"""Names of files in stores' staging folders, each for one request at a time; the files are used again and again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tdserve.server.opened_store import OpenedStore

_VALUES_SUFFIX = ".values"


class StagingNames:
    """Gives out names.

    Args:
        kind: Sets them apart from those that another such object gives out.
    """

    def __init__(self, kind: str = "") -> None:
        self._kind = kind
        self._in_use: set[str] = set()
        self._kept: set[str] = set()

    @contextmanager
    def borrow(self, entry: OpenedStore, *, is_needed: bool) -> Iterator[str]:
        """A block in which a path, without suffix, belongs to one request; ``""`` if it needs none."""
        if not is_needed:
            yield ""
            return
        number = 0
        while (path := str(entry.folder / "staging" / f"{self._kind}{number}")) in self._in_use:
            number += 1
        self._in_use.add(path)
        try:
            yield path
        finally:
            if path not in self._kept:
                self._in_use.discard(path)

    def keep(self, path: str) -> None:
        """Gives this name to nobody else in this run of the server: what lies there is still on record."""
        self._kept.add(path)


def values_path(staging: str) -> str:
    """The file that takes the values of the request to which a name was given."""
    return staging + _VALUES_SUFFIX if staging else ""
