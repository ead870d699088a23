"""Records of stores' new structures, each kept from when the structure takes effect until all files are in place.

``server/README.md`` has a reading order of recovery.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from tdserve.store.database.catalog_db import CatalogDB
from tdserve.store.rows.restructuring import FileChange, plan_file_change
from tdserve.structure.trees.tree import Path, Spec

_PREFIX = b"alter:"
"""Prefix of the key, in front of a store's uid."""


@dataclass(frozen=True)
class Restructured:
    """What remains to be done once the catalog has the new structure. Doing it again does no harm.

    Attributes:
        uid: Incarnation of the store.
        folder: Name, in the store's folder, of the folder in which new content was prepared.
        files: Changes of the tensors' files.
        moved_values: Keys under which non-tensor values lie, each with the key to which they move.
        cleared_values: Keys whose values are removed.
        kept_values: Keys of values that get other keys, each with the temporary key to which they move before anything
            else, and before this is recorded; not part of the record.
    """

    uid: str
    folder: str
    files: FileChange
    moved_values: tuple[tuple[Path, Path], ...]
    cleared_values: tuple[Path, ...]
    kept_values: tuple[tuple[Path, Path], ...] = ()

    @classmethod
    def from_change(
        cls, uid: str, folder: str, old: Spec, new: Spec, origins: Mapping[Path, Path | None], added: Spec | None
    ) -> Restructured:
        """Returns what it takes to turn a store of structure ``old`` into one of structure ``new``."""
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
            files=plan_file_change(old, new, origins, added),
            moved_values=tuple(moved),
            cleared_values=(*(waiting for waiting, _ in moved), *gone),
            kept_values=tuple(kept),
        )

    @property
    def changes_content(self) -> bool:
        """Whether files or values come, go or move; if only a lock changes, all rows stay as they are."""
        files = self.files
        return bool(
            files.kept
            or files.folders
            or files.files
            or files.left_files
            or files.left_folders
            or self.moved_values
            or self.cleared_values
        )

    @staticmethod
    def make_key(uid: str) -> bytes:
        """Returns the key of a store's record."""
        return _PREFIX + uid.encode()

    @property
    def key(self) -> bytes:
        """Key of the record."""
        return self.make_key(self.uid)

    def to_bytes(self) -> bytes:
        """Returns the content of the record."""
        values = {
            "folder": self.folder,
            "files": self.files.to_json(),
            "moved_values": self.moved_values,
            "cleared_values": self.cleared_values,
        }
        return json.dumps(values).encode("ascii")

    @classmethod
    def load(cls, db: CatalogDB) -> list[Restructured]:
        """Returns all records."""
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
