"""The structures that stores and versions have: each kept once, on disk too, and named by its fingerprint."""

from __future__ import annotations

import hashlib

from tdserve.errors import InvalidSpecError
from tdserve.spec import codec
from tdserve.spec.tree import Spec
from tdserve.store.catalog_db import CatalogDB
from tdserve.v1 import spec_pb2


class Specs:
    """Structures by fingerprint and, where several differ in nothing else, by their order of keys.

    Args:
        db: The catalog.
    """

    def __init__(self, db: CatalogDB) -> None:
        self._db = db
        self._known: dict[bytes, Spec] = {}

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
        "" for the first of them, else the digest of its message."""
        first = self._find(spec.fingerprint)
        if first == spec:
            return ""
        content = codec.encode(spec).SerializeToString(deterministic=True)
        order = b"" if first is None else hashlib.sha256(content).digest()
        key = spec.fingerprint + order
        if self._find(key) is None:
            self._db.put("specs", key, content)
            self._known[key] = spec
        return order.hex()

    def _find(self, key: bytes) -> Spec | None:
        spec = self._known.get(key)
        if spec is None:
            content = self._db.get("specs", key)
            if content is not None:
                spec = self._known[key] = codec.decode(spec_pb2.Spec.FromString(content))
        return spec


def message_of(spec: Spec) -> spec_pb2.Spec:
    """The message of a structure, kept with it."""
    message: spec_pb2.Spec | None = spec.memo.get("message")
    if message is None:
        message = spec.memo["message"] = codec.encode(spec)
    return message
