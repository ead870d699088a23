"""Names of files in stores' staging folders. Each belongs to one request at a time; the files are reused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.store.roots.moved_files import STAGING_FOLDER

_VALUES_SUFFIX = ".values"


class StagingNames:
    """A pool of names.

    Args:
        kind: Prefix that keeps them apart from the names of other pools.
    """

    def __init__(self, kind: str = "") -> None:
        self._kind = kind
        self._in_use: set[str] = set()
        self._kept: set[str] = set()

    @contextmanager
    def borrow(self, store: OpenedStore, *, is_needed: bool) -> Iterator[str]:
        """A block in which a path, without suffix, belongs to one request; ``""`` if it needs none."""
        if not is_needed:
            yield ""
            return
        number = 0
        while (path := str(store.folder / STAGING_FOLDER / f"{self._kind}{number}")) in self._in_use:
            number += 1
        self._in_use.add(path)
        try:
            yield path
        finally:
            if path not in self._kept:
                self._in_use.discard(path)

    def keep(self, path: str) -> None:
        """Stops lending this name in this run of the server: its file is still on record."""
        self._kept.add(path)


def make_values_path(staging: str) -> str:
    """Returns the path of the file for the values of the request that has borrowed a name; ``""`` if it has none."""
    return staging + _VALUES_SUFFIX if staging else ""
