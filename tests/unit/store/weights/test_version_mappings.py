"""The registry of mapped version files."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import numpy as np
import torch

from tdserve.store.weights import version_mappings
from tdserve.store.weights.version_mappings import VersionMapping
from tdserve.store.weights.versions import VersionFile, list_leaf_places
from tdserve.structure.trees.tree import Node, Spec, TensorLeaf

SPEC = Spec(Node((), None, None, None, (("w", TensorLeaf("float32", (2, 3))), ("v", TensorLeaf("int64", ())))))


def _open(path: Path) -> int:
    path.write_bytes(bytes(8192))
    return os.open(path, os.O_RDWR)


def test_mapping_when_the_file_is_renamed_then_is_the_same(tmp_path: Path) -> None:
    fd = _open(tmp_path / "a")
    first = version_mappings.acquire(fd, writable=True, path=tmp_path)
    os.rename(tmp_path / "a", tmp_path / "b")
    with (tmp_path / "b").open("rb") as again:
        assert version_mappings.acquire(again.fileno(), writable=False, path=tmp_path) is first
    os.close(fd)


def test_mapping_when_it_must_be_writable_then_replaces_one_for_reading(tmp_path: Path) -> None:
    fd = _open(tmp_path / "a")
    reading = version_mappings.acquire(fd, writable=False, path=tmp_path)
    writing = version_mappings.acquire(fd, writable=True, path=tmp_path)
    assert not reading.writable
    assert writing.writable
    assert version_mappings.acquire(fd, writable=True, path=tmp_path) is writing
    os.close(fd)


def test_mapping_when_the_file_is_unlinked_then_is_forgotten(tmp_path: Path) -> None:
    fd, kept = _open(tmp_path / "a"), _open(tmp_path / "kept")
    mapping, other = (
        version_mappings.acquire(fd, writable=True, path=tmp_path),
        version_mappings.acquire(kept, writable=True, path=tmp_path),
    )
    os.unlink(tmp_path / "a")
    version_mappings.drop_unlinked()
    assert version_mappings.acquire(fd, writable=True, path=tmp_path) is not mapping
    assert version_mappings.acquire(kept, writable=True, path=tmp_path) is other
    os.close(fd)
    os.close(kept)


def test_leaf_views_when_neighbours_share_a_shape_or_not_then_each_is_its_own_bytes() -> None:
    shapes = {"a": (2, 3), "b": (2, 3), "c": (6,), "d": (), "e": (), "f": (3, 1, 2), "g": (0, 4), "h": (5,), "i": (5,)}
    entries = tuple((key, TensorLeaf("float32", shape)) for key, shape in shapes.items())
    spec = Spec(Node((), None, None, None, (*entries, ("j", TensorLeaf("int16", (2, 2))))))
    content = torch.empty(spec.nbytes, dtype=torch.uint8)
    leaves = version_mappings.make_leaf_views(content, spec)
    assert list(leaves) == [path for path, _ in spec.tensors]
    for path, leaf in spec.tensors:
        assert (leaves[path].shape, str(leaves[path].dtype)) == (leaf.shape, f"torch.{leaf.dtype}")
    for path, offset, nbytes in list_leaf_places(spec):
        leaves[path].fill_(offset % 251)
        assert leaves[path].is_contiguous()
        assert not nbytes or leaves[path].data_ptr() == content.data_ptr() + offset
        assert leaves[path].nbytes == nbytes


def test_private_mapping_when_made_then_not_in_the_registry_and_each_has_its_own_tensors(tmp_path: Path) -> None:
    fd = _open(tmp_path / "a")
    first, second = (VersionMapping.map_private(fd, path=tmp_path) for _ in range(2))
    assert version_mappings.acquire(fd, writable=False, path=tmp_path) not in (first, second)
    os.close(fd)


def test_when_dropped_when_any_tensor_lives_then_not_yet(tmp_path: Path) -> None:
    file = VersionFile.create(tmp_path / "1.safetensors", SPEC)
    file.leaves["w",].fill_(3)
    file.seal()
    dropped: list[int] = []
    fd = os.open(file.path, os.O_RDONLY)
    mapping = VersionMapping.map_private(fd, path=file.path)
    os.close(fd)
    mapping.call_when_dropped(dropped.append, 5)
    row = mapping.get_leaves(SPEC)["w",][1]
    del mapping
    gc.collect()
    assert dropped == []
    assert torch.equal(row, torch.full((3,), 3.0))
    del row
    gc.collect()
    assert dropped == [5]


def test_file_when_unlinked_while_it_is_filled_then_no_other_file_gets_its_bytes(tmp_path: Path) -> None:
    version = VersionFile.create(tmp_path / "1.safetensors", SPEC)
    os.unlink(tmp_path / "1.safetensors.part")
    version_mappings.drop_unlinked()
    others = [(tmp_path / f"other{number}").open("xb") for number in range(8)]
    nbytes = len(version.content)
    version.fill([np.full(nbytes, 7, np.uint8)])
    assert [os.fstat(file.fileno()).st_size for file in others] == [0] * len(others)
    assert version.content.tolist() == [7] * nbytes
    for file in others:
        file.close()


def test_mapping_when_replaced_by_a_writable_one_then_its_descriptor_is_open_until_it_is_dropped(
    tmp_path: Path,
) -> None:
    fd = _open(tmp_path / "a")
    reading = version_mappings.acquire(fd, writable=False, path=tmp_path)
    inode, number = os.fstat(fd).st_ino, reading.fd
    version_mappings.acquire(fd, writable=True, path=tmp_path)
    assert os.fstat(number).st_ino == inode
    del reading
    gc.collect()
    assert not _is_open(number, inode)
    os.close(fd)


def _is_open(fd: int, inode: int) -> bool:
    try:
        return os.fstat(fd).st_ino == inode
    except OSError:
        return False
