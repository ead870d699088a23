"""The structures of stores and versions; each is kept once, also on disk, and identified by its fingerprint."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Iterable
from itertools import islice

from tdserve.base.errors import InvalidSpecError
from tdserve.store.database.catalog_db import CatalogDB
from tdserve.structure.trees import codec
from tdserve.structure.trees.tree import Spec
from tdserve.v1 import spec_pb2

MIN_KEPT = 64
"""Number of structures below which unused ones are not searched for."""

STEPS_PER_LEARNT = 128
"""Stores visited, or structures forgotten, each time that one is learnt. Visiting tens of thousands of stores at once
would block all requests."""


class Specs:
    """Structures by fingerprint and, if several differ only in the order of keys, by that order.

    Stores and versions come and go, each perhaps with its own structure. When the number of structures has doubled
    since the last search, another search forgets the unused ones. It advances a few steps with each structure that is
    learnt, so that it costs next to nothing.

    Args:
        db: The catalog.
        in_use: Yields the keys (:func:`make_keys`) of all structures of stores and versions, including stores that are
            being created. It is read in steps while stores come and go, and need not yield those that come in the
            meantime.
    """

    def __init__(self, db: CatalogDB, in_use: Callable[[], Iterable[bytes]]) -> None:
        self._db = db
        self._in_use = in_use
        self._known: dict[bytes, Spec] = {}
        self._max_kept = MIN_KEPT
        self._forgetting: Generator[None] | None = None
        self._learnt: set[bytes] = set()  # since the search began: ``in_use`` may lack them

    def get(self, fingerprint: bytes, order: str = "") -> Spec:
        """Returns a structure of some store or version, in the order of keys that :meth:`learn` has named.

        Raises:
            InvalidSpecError: No store or version has it.
        """
        spec = self._find(fingerprint + bytes.fromhex(order)) if fingerprint else None
        if spec is None:
            raise InvalidSpecError(reason=f"no store has a structure {fingerprint.hex()[:16]}; send it along")
        return spec

    def learn(self, spec: Spec) -> str:
        """Remembers a structure, also on disk. The caller takes it into use before anything else is learnt.

        Returns:
            The name of its order of keys among the structures with its fingerprint: "" for the first of them, otherwise
            the digest of its message, in hexadecimal digits.
        """
        first = self._find(spec.fingerprint)
        if first is not spec and first != spec:
            self._forget_some()
            first = self._find(spec.fingerprint)
        self._learnt.add(spec.fingerprint)
        if first is spec or first == spec:
            return ""
        content = codec.encode(spec).SerializeToString(deterministic=True)
        order = b"" if first is None else hashlib.sha256(content).digest()
        key = spec.fingerprint + order
        self._learnt.add(key)
        if self._find(key) is None:
            self._db.put("specs", key, content)
            self._known[key] = spec
        return order.hex()

    def _forget_some(self) -> None:
        if self._forgetting is None:
            self._learnt.clear()
            if self._db.count_records("specs") < self._max_kept:
                return
            self._forgetting = self._forget_unused()
        for _ in islice(self._forgetting, STEPS_PER_LEARNT):
            pass

    def _forget_unused(self) -> Generator[None]:
        """Forgets unused structures in steps; between them stores may come and go."""
        kept, in_use = self._db.list_keys("specs"), set()
        for key in self._in_use():
            in_use.add(key)
            yield
        num_forgotten = 0
        for key in kept:
            if key not in in_use and key not in self._learnt:
                self._db.delete("specs", key)
                self._known.pop(key, None)
                num_forgotten += 1
                yield
        self._max_kept = max(MIN_KEPT, 2 * (len(kept) - num_forgotten))
        self._forgetting = None

    def _find(self, key: bytes) -> Spec | None:
        spec = self._known.get(key)
        if spec is None:
            content = self._db.get("specs", key)
            if content is not None:
                spec = self._known[key] = codec.decode(spec_pb2.Spec.FromString(content))
        return spec


def make_keys(fingerprint: bytes, order: str) -> tuple[bytes, bytes]:
    """Returns the keys that must be kept for a structure, given its fingerprint and the name of its order of keys.

    The first structure of a fingerprint is kept too: it is used where the order does not matter.
    """
    return fingerprint, fingerprint + bytes.fromhex(order)


def get_message(spec: Spec) -> spec_pb2.Spec:
    """Returns the message of a structure, which is kept with it."""
    message: spec_pb2.Spec | None = spec.memo.get("message")
    if message is None:
        message = spec.memo["message"] = codec.encode(spec)
    return message
