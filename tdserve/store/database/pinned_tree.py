"""The tree of an open LMDB environment as it is at one moment, whatever is written afterwards."""

from __future__ import annotations

from pathlib import Path

import lmdb

from tdserve.base.errors import CorruptDataError
from tdserve.store.database.page_walk import Meta, count_used_pages, find_broken_page, read_metas


class PinnedTree:
    """Keeps the newest records of an environment until it is closed; the file grows meanwhile.

    Args:
        env: Open in this process.
        path: Its data file.

    Attributes:
        transaction: Reads the records.
    """

    def __init__(self, env: lmdb.Environment, path: Path) -> None:
        self._path = path
        self._page_nbytes = int(env.stat()["psize"])
        found: Meta | None = None
        while found is None:  # two commits since would replace the page that names the tree
            self.transaction = env.begin()
            number = self.transaction.id()
            with open(path, "rb", buffering=0) as file:
                metas = read_metas(file, self._page_nbytes)
            found = next((meta for meta in metas if meta.transaction == number), None)
            if found is None:
                self.transaction.abort()
        self._meta = found

    def check_pages(self) -> None:
        """Raises CorruptDataError if a page is damaged. Without LMDB, which would end the process there."""
        if reason := find_broken_page(self._path, self._meta, self._page_nbytes):
            actual = f"{reason}; stop the server, and see `tdserve check`"
            raise CorruptDataError(path=str(self._path), expected="a file without damaged pages", actual=actual)

    def count_unused_bytes(self) -> int:
        """Returns the bytes of the file that no record takes; 0 if a page that leads to them is broken."""
        num_used = count_used_pages(self._path, self._meta, self._page_nbytes)
        return (self._meta.last_page - 1 - num_used) * self._page_nbytes if num_used else 0

    def close(self) -> None:
        """Lets the records go."""
        self.transaction.abort()

    def __enter__(self) -> PinnedTree:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
