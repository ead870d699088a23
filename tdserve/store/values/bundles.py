"""Bundles: the values of several paths of a row, stored as one. Opaque bytes, as in ``objects``.

Values that new rows get together under several paths are stored as one (``values.value_bundles``). In the table
``values``, the key of a row's bundle begins with the bundle's name, 16 bytes made from its paths. The table ``paths``
maps this name to the list of paths, and the name of each path followed by ``in`` to the bundle's name. A path is in one
bundle at most. A value under the path's own name takes precedence over the one in the row's bundle. So a single value
is overwritten on its own, and the content of a bundle never changes: it is only replaced as a whole or taken apart.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import lmdb

from tdserve.base.errors import CorruptDataError, RemoteProtocolError
from tdserve.store.disk.sealed import seal
from tdserve.store.values.object_rows import KeyPath, clear, has_rows, make_name, read_all
from tdserve.values.value_bundles import Unbundled
from tdserve.values.value_columns import Buffer

_MEMBER = b"in"


class Bundle(NamedTuple):
    """Paths whose values are stored together.

    Attributes:
        name: Its name in keys.
        paths: The paths, in their order in each bundle.
    """

    name: bytes
    paths: tuple[KeyPath, ...]

    @classmethod
    def from_paths(cls, paths: Sequence[KeyPath]) -> Bundle:
        """Returns the bundle of these paths."""
        return cls(make_name(tuple(paths)), tuple(paths))


class Bundles:
    """The bundles of one environment. Threads: as its transactions.

    Args:
        values: The table of values.
        paths: The table of paths.
        folder: Its folder, for messages.
    """

    def __init__(self, values: Any, paths: Any, folder: str) -> None:
        self._values = values
        self._paths = paths
        self._folder = folder
        self._known: dict[bytes, Bundle] = {}  # a name always means the same paths

    def find_bundle(self, txn: lmdb.Transaction, path: KeyPath) -> Bundle | None:
        """Returns the bundle that a path is in, if any."""
        held = txn.get(make_name(path) + _MEMBER, db=self._paths)
        if held is None:
            return None
        name = bytes(held)
        found = self._known.get(name)
        if found is None:
            encoded = txn.get(name, db=self._paths)
            if encoded is None:
                raise CorruptDataError(path=self._folder, expected=f"the bundle of {path}", actual="none")
            found = self._known[name] = Bundle(name, tuple(map(tuple, json.loads(bytes(encoded)))))
        return found

    def put(
        self, txn: lmdb.Transaction, paths: Sequence[KeyPath], tails: Sequence[bytes], bundles: Sequence[Buffer]
    ) -> None:
        """Stores a bundle per row; removes all other values of the rows under these paths."""
        bundle = Bundle.from_paths(paths)
        cursor = txn.cursor(db=self._values)
        for path in paths:
            held = self.find_bundle(txn, path)
            if held != bundle:
                self._take_in(txn, bundle, path, held)
            name = make_name(path)
            if has_rows(cursor, name):
                for tail in tails:
                    txn.delete(name + tail, db=self._values)
        keys = list(map(bundle.name.__add__, tails))
        cursor.putmulti(list(zip(keys, map(seal, keys, bundles), strict=True)))

    def _take_in(self, txn: lmdb.Transaction, bundle: Bundle, path: KeyPath, held: Bundle | None) -> None:
        if held is not None:
            self.take_apart(txn, held)
        for names, key in ((path, make_name(path)), (bundle.paths, bundle.name)):
            txn.put(key, json.dumps(names).encode(), db=self._paths)
        txn.put(make_name(path) + _MEMBER, bundle.name, db=self._paths)

    def delete(self, txn: lmdb.Transaction, bundle: Bundle, tails: Sequence[bytes]) -> None:
        """Deletes the bundles of rows whose values have all been written again under the names of their own paths."""
        for tail in tails:
            txn.delete(bundle.name + tail, db=self._values)

    def unbundle_path(self, txn: lmdb.Transaction, path: KeyPath, going: set[KeyPath] | frozenset[KeyPath]) -> None:
        """Moves all values of a path out of bundles. Paths in ``going`` will be deleted next in any case."""
        bundle = self.find_bundle(txn, path)
        if bundle is None:
            return
        if going.issuperset(bundle.paths):
            self._forget(txn, bundle)
        else:
            self.take_apart(txn, bundle)

    def take_apart(self, txn: lmdb.Transaction, bundle: Bundle) -> None:
        """Moves the values of a bundle to their paths' own names."""
        names = [make_name(path) for path in bundle.paths]
        for tail, content in read_all(txn.cursor(db=self._values), bundle.name, self._folder):
            unbundled = self.unbundle(bundle, [content])
            for number, name in enumerate(names):
                record = seal(name + tail, next(unbundled.iter_column(number)) or b"")
                txn.put(name + tail, record, overwrite=False, db=self._values)
        self._forget(txn, bundle)

    def _forget(self, txn: lmdb.Transaction, bundle: Bundle) -> None:
        clear(txn.cursor(db=self._values), bundle.name)
        for path in bundle.paths:
            txn.delete(make_name(path) + _MEMBER, db=self._paths)
        txn.delete(bundle.name, db=self._paths)

    def unbundle(self, bundle: Bundle, bundles: Sequence[Buffer | None]) -> Unbundled:
        """Returns the values in bundles of rows.

        Raises:
            CorruptDataError: They are damaged.
        """
        try:
            return Unbundled(bundles, len(bundle.paths))
        except RemoteProtocolError as error:
            actual = str(error.fields["received"])
            raise CorruptDataError(path=self._folder, expected=f"values of {bundle.paths}", actual=actual) from None
