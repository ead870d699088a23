"""Opening a store's leaves: shared, checked, never through a symlink."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tdserve.base.errors import CorruptDataError
from tdserve.store.rows.leaf_folders import create
from tdserve.store.rows.mapping import open_leaves, view_leaf
from tdserve.structure.trees.tree import Node, Spec, TensorLeaf, ValueLeaf

INNER = Node((2,), None, None, None, (("x", TensorLeaf("float32", (2, 3))), ("shape", TensorLeaf("int16", (2,)))))
SPEC = Spec(
    Node(
        (2,),
        None,
        None,
        None,
        (
            ("n", INNER),
            ("text", ValueLeaf((2,), False)),
            ("empty", TensorLeaf("int64", (2, 0))),
            ("a", TensorLeaf("int64", (2,))),
        ),
    )
)

READ = """
import sys
from tdserve.store.rows.mapping import open_leaves
from tests.unit.store.rows.test_mapping import SPEC
leaves = open_leaves(sys.argv[1], SPEC, writable=False)
print(leaves["a",].tolist(), leaves["n", "shape"].tolist())
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    create(tmp_path / "store", SPEC)
    return tmp_path / "store"


def test_leaves_when_opened_then_are_those_of_the_spec_without_values(folder: Path) -> None:
    leaves = open_leaves(folder, SPEC)
    assert [(path, tuple(leaf.shape)) for path, leaf in leaves.items()] == [
        (path, leaf.shape) for path, leaf in SPEC.tensors
    ]
    assert leaves["n", "x"].dtype == torch.float32
    assert not leaves["n", "x"].any()


@pytest.mark.slow
def test_leaves_when_written_then_another_process_reads_it(folder: Path) -> None:
    leaves = open_leaves(folder, SPEC)
    leaves["a",].copy_(torch.tensor([5, 6]))
    leaves["n", "shape"].copy_(torch.tensor([7, 8]))
    done = subprocess.run([sys.executable, "-c", READ, str(folder)], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[5, 6] [7, 8]", done.stderr


def test_leaves_when_opened_for_reading_then_need_no_right_to_write_and_stay_current(folder: Path) -> None:
    readers = open_leaves(folder, SPEC, writable=False)
    open_leaves(folder, SPEC)["a",].fill_(9)
    assert readers["a",].tolist() == [9, 9]
    permissions = [line.split()[1] for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]
    assert "r--s" in permissions


@pytest.mark.parametrize("name", ["rows/a.memmap", "rows/n/x.memmap", "extra/000000.memmap"])
@pytest.mark.parametrize("change", ["shorter", "longer", "missing"])
def test_file_when_of_another_size_then_is_corrupt_and_unchanged(folder: Path, name: str, change: str) -> None:
    file = folder / name
    nbytes = {"shorter": file.stat().st_size - 1, "longer": file.stat().st_size + 1}.get(change, -1)
    if nbytes < 0:
        file.unlink(missing_ok=True)
    else:
        os.truncate(file, nbytes)
    with pytest.raises(CorruptDataError, match=str(file)):
        open_leaves(folder, SPEC)
    assert file.exists() == (nbytes >= 0)
    assert nbytes < 0 or file.stat().st_size == nbytes


@pytest.mark.parametrize("name", ["rows/a.memmap", "rows/n", "rows", "extra"])
def test_file_when_it_is_a_symlink_then_is_not_followed(folder: Path, name: str) -> None:
    (folder / name).rename(folder.parent / "moved")
    (folder / name).symlink_to(folder.parent / "moved")
    with pytest.raises(CorruptDataError, match=name):
        open_leaves(folder, SPEC)


def test_folder_when_missing_then_is_corrupt(tmp_path: Path) -> None:
    with pytest.raises(CorruptDataError):
        open_leaves(tmp_path / "none", SPEC)


def test_leaf_view_when_scalar_then_has_no_dimensions() -> None:
    buffer = torch.zeros(16, dtype=torch.uint8)
    view_leaf(buffer, 8, TensorLeaf("float64", ())).fill_(2.0)
    assert buffer.view(torch.float64).tolist() == [0.0, 2.0]
