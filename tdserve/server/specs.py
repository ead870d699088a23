"""The structures that stores and versions have: each kept once, on disk too, and named by its fingerprint."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Iterable
from itertools import islice

from tdserve.base.errors import InvalidSpecError
from tdserve.store.catalog_db import CatalogDB
from tdserve.structure import codec
from tdserve.structure.tree import Spec
from tdserve.v1 import spec_pb2

MIN_KEPT = 64
"""Of fewer it is not worth looking which of them nothing has any more."""

STEPS_PER_LEARNT = 128
"""Stores that are looked at, or structures that are forgotten, while one more is learnt: a look at tens of thousands
of stores at once would keep everybody waiting."""


class Specs:
    """Structures by fingerprint and, where several differ in nothing else, by their order of keys.

    Stores and versions come and go, each perhaps with a structure of its own: what none of them has any more is
    forgotten when so many have been learnt as were left the last time, a few with each that is learnt, so that this
    costs next to nothing.

    Args:
        db: The catalog.
        in_use: Keys, as of :func:`keys_of`, of all that stores and versions have, those that are being made too. It is
            read piece by piece while stores come and go: of those that come meanwhile it need not tell.
    """

    def __init__(self, db: CatalogDB, in_use: Callable[[], Iterable[bytes]]) -> None:
        self._db = db
        self._in_use = in_use
        self._known: dict[bytes, Spec] = {}
        self._max_kept = MIN_KEPT
        self._forgetting: Generator[None] | None = None
        self._learnt: set[bytes] = set()  # since it began to look: nobody else may know yet that they are in use

    def get(self, fingerprint: bytes, order: str = "") -> Spec:
        """A structure that some store or version has, in that order of keys which :meth:`learn` has named so.

        Raises:
            InvalidSpecError: None has it.
        """
        spec = self._find(fingerprint + bytes.fromhex(order)) if fingerprint else None
        if spec is None:
            raise InvalidSpecError(reason=f"no store has a structure {fingerprint.hex()[:16]}; send it along")
        return spec

    def learn(self, spec: Spec) -> str:
        """Remembers a structure, also on disk; returns what names its order of keys among those with its fingerprint:
        "" for the first of them, else the digest of its message.

        Whoever takes it into use does so before anything else is learnt.
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
            if self._db.num_records("specs") < self._max_kept:
                return
            self._forgetting = self._forget_unused()
        for _ in islice(self._forgetting, STEPS_PER_LEARNT):
            pass

    def _forget_unused(self) -> Generator[None]:
        """In steps, between which stores may come and go."""
        kept, in_use = self._db.keys("specs"), set()
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


def keys_of(fingerprint: bytes, order: str) -> tuple[bytes, bytes]:
    """What must be kept for a structure, by its fingerprint and what :meth:`Specs.learn` has named its order of keys:
    the first structure of a fingerprint stands for it where the order does not matter."""
    return fingerprint, fingerprint + bytes.fromhex(order)


def message_of(spec: Spec) -> spec_pb2.Spec:
    """The message of a structure, kept with it."""
    message: spec_pb2.Spec | None = spec.memo.get("message")
    if message is None:
        message = spec.memo["message"] = codec.encode(spec)
    return message
