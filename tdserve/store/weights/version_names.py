"""Names of version files in each state, and renames that need no mapping. No torch: control may retire and discard.

``<n>.safetensors`` is a version, ``<n>.retired`` waits to be recycled; ``<n>.values`` holds a version's non-tensor
values. A version without a number yet is ``new-<name>.safetensors``, and ``.part`` is added until it is whole.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from tdserve.store.disk.faults import convert_os_errors

SUFFIX = ".safetensors"
PART = ".part"
_UNFINISHED = "new-"


def make_part_name(final: Path) -> Path:
    """Returns the name while it is written."""
    return final.with_name(final.name + PART)


def make_unfinished_name(folder: Path, name: str) -> Path:
    """Returns the name of a version that has no number yet."""
    return folder / f"{_UNFINISHED}{name}{SUFFIX}"


def make_retired_name(final: Path) -> Path:
    """Returns the name while it waits to be recycled."""
    return final.with_suffix(".retired")


def make_values_name(final: Path) -> Path:
    """Returns the name of the file with its non-tensor values."""
    return final.with_suffix(".values")


def give_number(unfinished: Path, final: Path) -> None:
    """Renames the whole file of a version, and that of its values, once it has a number. Raises CorruptDataError if
    there is none."""
    with convert_os_errors(unfinished):
        with contextlib.suppress(FileNotFoundError):
            os.replace(make_values_name(unfinished), make_values_name(final))
        os.replace(unfinished, final)


def retire(path: str | os.PathLike[str]) -> None:
    """Renames a version's file so that it can be recycled; does nothing if there is no file."""
    final = Path(path)
    with convert_os_errors(final):
        make_values_name(final).unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):  # it was retired, or abandoned, before a restart
            os.replace(final, make_retired_name(final))


def remove_leftovers(folder: Path, *, kept: set[int], free: set[int]) -> None:
    """Brings the files in line with the catalog after a restart, since a crash may have come in between.

    Args:
        folder: Folder of a weights store's versions.
        kept: Numbers that stay as they are.
        free: Numbers whose files are to be recycled. All other files are removed.
    """
    with convert_os_errors(folder):
        names = {path.name.partition(".")[0] for path in folder.iterdir()}
    for name in names:
        if name.startswith(_UNFINISHED):
            discard(folder / f"{name}{SUFFIX}")
    for number in map(int, filter(str.isdecimal, names)):
        if number in free:
            retire(folder / f"{number}{SUFFIX}")
        elif number not in kept:
            discard(folder / f"{number}{SUFFIX}")


def discard(path: str | os.PathLike[str]) -> None:
    """Removes every file of a version, or of one without a number, in whatever state. Processes that have it mapped may
    continue; its space is freed after them.

    A process that mapped it drops the mapping with its next :meth:`~tdserve.store.weights.versions.VersionFile.create`
    or ``open``.
    """
    final = Path(path)
    with convert_os_errors(final):
        for name in (final, make_part_name(final), make_retired_name(final), make_values_name(final)):
            name.unlink(missing_ok=True)
