"""Changes the files of a store whose structure changes: what to move, create and remove, and doing it.

New files are created in a folder of their own inside the store's, which no reader opens. Once the catalog has the new
structure, the files are renamed into their places and leftovers are removed; a crash in between is repaired by
repeating that.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path as FilePath

from tdserve.base.failpoints import reach
from tdserve.store.disk.faults import convert_os_errors
from tdserve.store.disk.held_folder import find_name
from tdserve.store.rows.format import Folder, plan
from tdserve.structure.trees.tree import Path, Spec

PREFIX = "altering-"
"""Prefix of the folders in which new files are created."""

_KEPT = "kept"
"""Folder inside it: leaves that move, as second names of their files."""

_TEXTS = "texts"
"""Folder inside it: small files with their new content, by number."""


@dataclass(frozen=True)
class FileChange:
    """The steps, in this order. All names are relative, with ``/`` between folders.

    Attributes:
        kept: Files of the store that get a second name before anything changes: (in the store, in the folder).
        folders: Folders to create in the store.
        files: Files to rename, replacing existing ones: (in the folder, in the store).
        texts: Small files of the store that get new content.
        left_files, left_folders: Files and folders of the store to remove.
    """

    kept: tuple[tuple[str, str], ...]
    folders: tuple[str, ...]
    files: tuple[tuple[str, str], ...]
    texts: tuple[str, ...]
    left_files: tuple[str, ...]
    left_folders: tuple[str, ...]

    def to_json(self) -> str:
        """Returns it as text, for the record of the change."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> FileChange:
        """Returns the change that ``to_json`` wrote."""
        values = json.loads(text)
        pairs = ("kept", "files")
        return cls(**{name: tuple(map(tuple, value) if name in pairs else value) for name, value in values.items()})


def plan_file_change(old: Spec, new: Spec, origins: Mapping[Path, Path | None], added: Spec | None) -> FileChange:
    """Returns the change of the files of a store of structure ``old``.

    Args:
        origins: The path in ``old`` of each leaf of ``new``; None: it comes from ``added``.
        added: Structure of the new files in the folder.
    """
    before, after = _FileNames(old), _FileNames(new)
    made = {} if added is None else _FileNames(added).files
    kept: list[tuple[str, str]] = []
    files: list[tuple[str, str]] = []
    for path, name in after.files.items():
        origin = origins[path]
        if origin is None:
            files.append((made[path], name))
        elif before.files[origin] != name:
            second = f"{_KEPT}/{len(kept):06d}"
            kept.append((before.files[origin], second))
            files.append((second, name))
    here = set(after.files.values())
    return FileChange(
        kept=tuple(kept),
        folders=tuple(name for name in after.folders if name not in before.folders),
        files=tuple(files),
        texts=tuple(name for name, text in after.texts.items() if before.texts.get(name) != text),
        left_files=tuple(
            name for name in (*before.files.values(), *before.texts) if name not in here and name not in after.texts
        ),
        left_folders=tuple(name for name in reversed(before.folders) if name not in after.folders),
    )


def keep(store: FilePath, folder: FilePath, change: FileChange, new: Spec) -> None:
    """Creates the folder, writes the small files in it, and gives the files that move their second names there, so that
    the remaining steps need no room. Nothing visible changes.

    Raises:
        CapacityError, CorruptDataError: This failed.
    """
    with convert_os_errors(find_name(store) / folder.name):
        folder.mkdir(exist_ok=True)
        if change.kept:
            (folder / _KEPT).mkdir()
            for name, second in change.kept:
                os.link(store / name, folder / second, follow_symlinks=False)
        (folder / _TEXTS).mkdir()
        texts = _FileNames(new).texts
        for number, name in enumerate(change.texts):
            (folder / _TEXTS / str(number)).write_bytes(texts[name])


def carry_out(store: FilePath, folder: FilePath, change: FileChange) -> None:
    """Gives a store the files of its new structure. It is safe to repeat.

    Raises:
        CapacityError, CorruptDataError: It could not be finished, and has to be repeated.
    """
    with convert_os_errors(find_name(store)):
        for name in change.folders:
            (store / name).mkdir(exist_ok=True)
        for made, name in change.files:
            if (folder / made).exists():  # otherwise it was renamed before a crash
                os.replace(folder / made, store / name)
                reach("alteration.part-moved")
        for number, name in enumerate(change.texts):
            if (text := folder / _TEXTS / str(number)).exists():
                os.replace(text, store / name)
        for name in change.left_files:
            (store / name).unlink(missing_ok=True)
        for name in change.left_folders:
            if (store / name).is_dir() and not any((store / name).iterdir()):  # files that are not ours stay
                (store / name).rmdir()


def list_leftovers(store: FilePath) -> list[FilePath]:
    """Returns folders of new files of changes that were never committed, or that are complete."""
    return sorted(store.glob(f"{PREFIX}*"))


def remove(folder: FilePath) -> None:
    """Removes such a folder."""
    shutil.rmtree(folder, ignore_errors=True)


class _FileNames:
    """Every file of a structure, by relative names.

    Attributes:
        folders: Parents first.
        files: File of each leaf.
        texts: Contents of small files.
    """

    def __init__(self, spec: Spec) -> None:
        planned = plan(spec)
        self.folders: list[str] = []
        self.files: dict[Path, str] = {}
        self.texts: dict[str, bytes] = {}
        for top in filter(None, (planned.rows, planned.extra)):
            for name, folder in _walk(top, top.name):
                self.folders.append(name)
                self.files.update({path: f"{name}/{file}" for file, path, _ in folder.files})
                self.texts.update({f"{name}/{file}": text for file, text in folder.texts})


def _walk(folder: Folder, name: str) -> Iterator[tuple[str, Folder]]:
    yield name, folder
    for child in folder.folders:
        yield from _walk(child, f"{name}/{child.name}")
