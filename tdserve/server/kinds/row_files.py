"""Creates the files of stores with rows: leaves and generations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path as FilePath

from tdserve.rules.catalog import StoreRecord
from tdserve.store.durability.row_comparison import mark_compared
from tdserve.store.rows.adopted import Adopted
from tdserve.store.rows.generations import FILE_NAME as GENERATION_FILE, Generations
from tdserve.store.rows.leaf_folders import create
from tdserve.structure.trees.tree import Path, Spec

FILLED = 2
"""Generation of each row of a tensordict store, and its own number, after its first content."""


def make_files(
    folder: FilePath,
    spec: Spec,
    record: StoreRecord,
    adopted: Adopted | None = None,
    contents: Mapping[Path, bytes] | None = None,
) -> list[str]:
    """Creates the files of a store; returns the dotted names of the leaves that lie in ``extra/``.

    Args:
        adopted: Folder that has its tensors; None if it has files of its own.
        contents: First content of all its leaves; None if it has none yet.
    """
    if adopted is None:
        extra = create(folder, spec, contents or {})
    else:
        adopted.link(folder)
        extra = []
    if record.checksum:
        mark_compared(folder)
    num_rows = spec.num_rows
    # One more than rows: the last is the store's own number, twice its content version above the former one.
    generations = Generations.create(
        folder / GENERATION_FILE, uid=record.uid, num_rows=num_rows + 1, former_version=record.former_version
    )
    if contents is not None:
        generations.values.fill(FILLED)
    generations.close()
    return list_dotted(extra)


def list_dotted(paths: Iterable[Path]) -> list[str]:
    """Returns the names of leaves as a store's record has them."""
    return [".".join(path) for path in paths]
