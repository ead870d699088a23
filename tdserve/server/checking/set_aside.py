"""Folders of stores that no catalog describes: what they have, and how to bring it back by hand."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from tdserve.base.errors import CorruptDataError
from tdserve.store.disk.files import SET_ASIDE
from tdserve.store.durability.bare_rows import describe_lacking
from tdserve.store.rows.adoptable import META_FILE
from tdserve.store.rows.adopted import Adopted
from tdserve.store.rows.format import ROWS
from tdserve.store.values.object_folders import has_values
from tdserve.store.weights.version_names import SUFFIX

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
            f"publish its versions again ({numbers}), from Python: client.publish({name!r}, TensorDict("
            f"safetensors.torch.load_file('{files}')).unflatten_keys('.')), which have no values but "
            f"tensors; {_THEN}"
        )
    rows = folder / ROWS
    if (adopted := _read_adopted(folder)) is not None:
        flag = " --read-only" if adopted.read_only else ""
        return f"run tdserve adopt {adopted.path} {name}{flag}, {_THEN}"
    if has_values(folder) and not any(rows.rglob("*.memmap")):
        return (
            "its values, or entries, cannot be served without the catalog: restore a checkpoint, or delete this folder"
        )
    if not (rows / META_FILE).exists():
        return "it has neither rows nor versions: delete it"
    lacking = describe_lacking(folder)
    what = f", without {lacking}" if lacking else ""
    return (
        f"serve its tensors, as a tensordict store without checksums{what}: move {rows} out of the root to PATH, run "
        f"tdserve adopt PATH {name}, {_THEN}"
    )


def _read_adopted(folder: Path) -> Adopted | None:
    with suppress(CorruptDataError):
        return Adopted.load(folder)
    return None
