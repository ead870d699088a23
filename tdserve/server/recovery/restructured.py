"""A store's new structure on record, from the moment it is the store's until its files are all in their places."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from tdserve.store.catalog_db import CatalogDB
from tdserve.store.restructuring import FileChange, file_change
from tdserve.structure.tree import Path, Spec

_PREFIX = b"alter:"
"""In front of a store's uid."""


@dataclass(frozen=True)
class Restructured:
    """What is to be done once the catalog has the new structure. To do it again does no harm.

    Attributes:
        uid: The store's incarnation.
        folder: In which what comes was made: its name in the store's.
        files: Of the tensors.
        moved_values: Keys under which non-tensor values lie, and where they belong.
        cleared_values: Keys whose values go.
        kept_values: Before anything else: values that are to lie under other keys, and where they wait for that.
    """

    uid: str
    folder: str
    files: FileChange
    moved_values: tuple[tuple[Path, Path], ...]
    cleared_values: tuple[Path, ...]
    kept_values: tuple[tuple[Path, Path], ...] = ()

    @classmethod
    def of(
        cls, uid: str, folder: str, old: Spec, new: Spec, origins: Mapping[Path, Path | None], added: Spec | None
    ) -> Restructured:
        """What it takes to make a store of structure ``new`` of one of structure ``old``."""
        kept, moved = [], []
        for path, _ in new.values:
            origin, waiting = origins[path], (folder, *path)
            if origin is not None and origin != path:
                kept.append((origin, waiting))
            if origin != path:
                moved.append((waiting, path))
        here = {path for path, _ in new.values}
        gone = [path for path, _ in old.values if path not in here]
        return cls(
            uid=uid,
            folder=folder,
            files=file_change(old, new, origins, added),
            moved_values=tuple(moved),
            cleared_values=(*(waiting for waiting, _ in moved), *gone),
            kept_values=tuple(kept),
        )

    @staticmethod
    def key_of(uid: str) -> bytes:
        """Under which the change of a store is on record."""
        return _PREFIX + uid.encode()

    @property
    def key(self) -> bytes:
        """Of the record."""
        return self.key_of(self.uid)

    def to_bytes(self) -> bytes:
        """The record."""
        values = {
            "folder": self.folder,
            "files": self.files.to_json(),
            "moved_values": self.moved_values,
            "cleared_values": self.cleared_values,
        }
        return json.dumps(values).encode("ascii")

    @classmethod
    def load(cls, db: CatalogDB) -> list[Restructured]:
        """All on record."""
        found = []
        for key, content in db.scan("pending", _PREFIX):
            values = json.loads(content)
            found.append(
                cls(
                    uid=key[len(_PREFIX) :].decode(),
                    folder=values["folder"],
                    files=FileChange.from_json(values["files"]),
                    moved_values=tuple((tuple(old), tuple(new)) for old, new in values["moved_values"]),
                    cleared_values=tuple(map(tuple, values["cleared_values"])),
                )
            )
        return found
