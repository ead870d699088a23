"""The last versions of stores that were deleted, by name: those of the next store of a name follow.

So one number never means two contents of a name, and to readers that know a number of a deleted store those of the next
one are newer. Many names may be used once: of all but the last few thousand only the highest version is kept, and every
name that is not on record follows that.
"""

from __future__ import annotations

from tdserve.store.database.catalog_db import CatalogDB, Transaction

MAX_NAMES = 4096
"""Names on record, some tens of bytes each."""

_PREFIX = b"former/"
"""Begins keys in the table of states, whose others are uids."""

_OTHERS = _PREFIX + b"/"
"""Key of the highest version of all other names; no name begins with a slash."""


class FormerVersions:
    """The last versions of deleted stores.

    Args:
        db: The catalog.
        max_names: Names on record.
    """

    def __init__(self, db: CatalogDB, max_names: int = MAX_NAMES) -> None:
        self._max_names = max_names
        self._versions = {key: int(version) for key, version in db.scan("states", _PREFIX)}
        self._of_others = self._versions.pop(_OTHERS, 0)

    def find(self, name: str) -> int:
        """Returns the number that the versions of a new store of this name follow."""
        return self._versions.get(_PREFIX + name.encode(), self._of_others)

    def note(self, name: str, version: int, txn: Transaction) -> None:
        """Records the last version of a store as part of the transaction that removes it."""
        if version <= self.find(name):
            return
        key, dropped = _PREFIX + name.encode(), []
        if key not in self._versions and len(self._versions) >= self._max_names:
            dropped = [next(iter(self._versions))]
        of_others = max([self._of_others, *(self._versions[each] for each in dropped)])
        txn.put("states", key, b"%d" % version)
        if dropped:
            txn.put("states", _OTHERS, b"%d" % of_others)
        for each in dropped:
            txn.delete("states", each)

        def show() -> None:
            self._of_others = of_others
            for each in dropped:
                self._versions.pop(each, None)
            self._versions[key] = version

        txn.show(show)
