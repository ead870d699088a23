"""Folders of stores that no catalog describes: what they have, and how to bring it back by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tdserve.base.errors import TDServeError
from tdserve.store.adoptable import META_FILE
from tdserve.store.files import SET_ASIDE
from tdserve.store.format import ROWS
from tdserve.store.generations import FILE_NAME as GENERATION_FILE, Generations, read_uid
from tdserve.store.object_folders import has_values
from tdserve.store.row_columns import FOLDER as COLUMNS_FOLDER
from tdserve.store.version_names import SUFFIX

_UID_CHARS = 32

REASON = "files of a store that the catalog does not have, set aside: it is not in service"

_THEN = "then delete this folder"


def find_name(folder: Path) -> str:
    """Returns the name that a store had whose folder was set aside; only its beginning if it was long."""
    return folder.name.removeprefix(SET_ASIDE)[: -_UID_CHARS - 1] or "NAME"


def describe_remedy(folder: Path) -> str:
    """Returns what to do with a folder that was set aside, by what it has."""
    name = find_name(folder)
    versions = sorted(int(path.stem) for path in folder.glob(f"versions/*{SUFFIX}") if path.stem.isdecimal())
    if versions:
        numbers = ", ".join(map(str, versions[-8:]))
        files = f"{folder / 'versions'}/NUMBER{SUFFIX}"
        return (
            f"publish its versions again ({numbers}), from Python: client.publish({name!r}, "
            f"safetensors.torch.load_file('{files}')); {_THEN}"
        )
    rows = folder / ROWS
    if has_values(folder) and not any(rows.rglob("*.memmap")):
        return (
            "its values, or entries, cannot be served without the catalog: restore a checkpoint, or delete this folder"
        )
    if not (rows / META_FILE).exists():
        return "it has neither rows nor versions: delete it"
    lacking = _describe_lacking(folder)
    return (
        f"serve its tensors, as a tensordict store{lacking}: move this folder out of the root to PATH, and run "
        f"tdserve adopt PATH/{ROWS} {name}"
    )


def _describe_lacking(folder: Path) -> str:
    """Returns what a folder's tensors alone do not tell."""
    found = []
    if num_rows := _count_rows(folder):
        num_live, num_all = num_rows
        if num_live < num_all:
            found.append(f"all its {num_all} rows come, of which {num_live} have content")
    if (folder / COLUMNS_FOLDER).is_dir():
        found.append("without order, priorities and settings of the table or queue")
    if has_values(folder):
        found.append("without its non-tensor values")
    return f" ({'; '.join(found)})" if found else ""


def _count_rows(folder: Path) -> tuple[int, int] | None:
    """Returns how many rows have content, and how many there are; None if nothing tells."""
    try:
        path = folder / GENERATION_FILE
        generations = Generations.open(path, uid=read_uid(path))
    except TDServeError:
        return None
    rows = generations.values[:-1]
    num_live, num_all = int(np.count_nonzero((rows > 0) & (rows % 2 == 0))), len(rows)
    generations.close()
    return num_live, num_all
