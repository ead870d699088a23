"""Making the folders of a store: what tensordict reads there, and what is left if there is no room."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from tdserve.base.errors import CapacityError, CorruptDataError
from tdserve.store.rows.leaf_folders import create
from tdserve.store.rows.mapping import open_leaves
from tdserve.structure.trees.dtypes import ITEMSIZE
from tdserve.structure.trees.tree import Node, Spec, TensorLeaf
from tests.unit.store.conftest import SMALL_DISK_BYTES


def flat(leaves: dict[str, TensorLeaf], batch_size: tuple[int, ...] = ()) -> Spec:
    return Spec(Node(batch_size, None, None, None, tuple(leaves.items())))


@pytest.mark.parametrize("dtype", ITEMSIZE)
def test_leaf_when_of_any_dtype_then_is_in_rows_equal_or_in_extra(tmp_path: Path, dtype: str) -> None:
    spec = flat(
        {"a": TensorLeaf(dtype, (5, 2)), "none": TensorLeaf(dtype, (5, 0)), "b": TensorLeaf("uint8", (5,))}, (5,)
    )
    extra = create(tmp_path, spec)
    leaf = open_leaves(tmp_path, spec)["a",]
    leaf.view(torch.uint8).copy_(torch.arange(leaf.nbytes).view(5, -1) % 2)
    found = TensorDict.load_memmap(tmp_path / "rows", allow_pickle=False)
    assert found.batch_size == (5,)
    assert extra == ([("a",), ("none",)] if dtype.startswith("float8") else [])
    if not extra:
        assert found["a"].dtype == leaf.dtype
        assert torch.equal(found["a"].view(torch.uint8), leaf.view(torch.uint8))
        assert found["none"].shape == (5, 0)


def test_extra_when_there_are_leaves_for_it_then_its_index_names_them(tmp_path: Path) -> None:
    create(tmp_path, flat({"shape": TensorLeaf("int64", (4,)), "x": TensorLeaf("float8_e5m2", (4, 3))}, (4,)))
    assert json.loads((tmp_path / "extra" / "index.json").read_text()) == [
        {"key": ["shape"], "file": "000000.memmap", "dtype": "int64", "shape": [4]},
        {"key": ["x"], "file": "000001.memmap", "dtype": "float8_e5m2", "shape": [4, 3]},
    ]
    assert (tmp_path / "extra" / "000000.memmap").stat().st_size == 32
    assert list(TensorDict.load_memmap(tmp_path / "rows", allow_pickle=False).keys()) == []


def test_nested_nodes_when_read_by_tensordict_then_have_their_batch_sizes_and_names(tmp_path: Path) -> None:
    inner = Node((4, 2), ("time", "env"), "cuda:7", None, (("x", TensorLeaf("float32", (4, 2, 3))),))
    empty = Node((4,), ("time",), None, None, ())
    create(tmp_path, Spec(Node((4,), ("time",), None, None, (("inner", inner), ("empty", empty)))))
    found = TensorDict.load_memmap(tmp_path / "rows", allow_pickle=False)
    assert found["inner"].batch_size == (4, 2)
    assert found["inner"].names == ["time", "env"]
    assert found["inner", "x"].shape == (4, 2, 3)
    assert found["empty"].is_empty()
    assert found.names == ["time"]


def test_files_when_made_then_their_space_is_reserved(tmp_path: Path) -> None:
    create(tmp_path, flat({"a": TensorLeaf("uint8", (3 << 20,))}))
    assert (tmp_path / "rows" / "a.memmap").stat().st_blocks * 512 >= 3 << 20


def test_create_when_folder_has_rows_then_leaves_them(tmp_path: Path) -> None:
    spec = flat({"a": TensorLeaf("uint8", (3,))})
    create(tmp_path, spec)
    open_leaves(tmp_path, spec)["a",].fill_(7)
    with pytest.raises(CorruptDataError):
        create(tmp_path, spec)
    assert open_leaves(tmp_path, spec)["a",].tolist() == [7, 7, 7]


def test_create_when_the_disk_is_too_small_then_nothing_stays(small_disk: Path) -> None:
    with pytest.raises(CapacityError) as caught:
        create(small_disk / "store", flat({"a": TensorLeaf("uint8", (2 * SMALL_DISK_BYTES,))}))
    assert caught.value.asked == 2 * SMALL_DISK_BYTES
    assert 0 < caught.value.free <= SMALL_DISK_BYTES
    assert os.listdir(small_disk) == []


@pytest.mark.parametrize("folder_exists", [True, False])
def test_create_when_the_disk_fills_up_midway_then_nothing_stays(small_disk: Path, folder_exists: bool) -> None:
    # each leaf takes a page that the sum of sizes does not show: the first check passes, reserving fails
    spec = flat({f"k{i}": TensorLeaf("uint8", (1,)) for i in range(SMALL_DISK_BYTES // 4096 + 10)})
    folder = small_disk / "store"
    if folder_exists:
        folder.mkdir()
        (folder / "generation.memmap").touch()
    with pytest.raises(CapacityError):
        create(folder, spec)
    assert os.listdir(small_disk) == (["store"] if folder_exists else [])
    assert not folder_exists or os.listdir(folder) == ["generation.memmap"]


@pytest.mark.slow
def test_create_when_there_are_2000_leaves_then_takes_seconds_and_no_descriptors(tmp_path: Path) -> None:
    spec = flat({f"k{i}": TensorLeaf("float32", ()) for i in range(2_000)})
    start, num_fds = time.thread_time(), len(os.listdir("/proc/self/fd"))
    create(tmp_path, spec)
    leaves = open_leaves(tmp_path, spec)
    assert time.thread_time() - start < 10
    assert len(os.listdir("/proc/self/fd")) <= num_fds
    leaves["k1999",].fill_(1.5)
    assert open_leaves(tmp_path, spec)["k1999",] == 1.5
