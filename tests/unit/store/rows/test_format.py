"""The plan of tensordict's folder format, compared with tensordict's own writes and reads."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict, tensorclass

from tdserve.store.rows.format import encode_key, plan
from tdserve.store.rows.leaf_folders import create
from tdserve.structure.trees.tree import Node, Path as KeyPath, Spec, TensorLeaf

F32 = TensorLeaf("float32", (3,))


@tensorclass
class Pair:
    """What a client's class looks like to tensordict."""

    left: torch.Tensor
    right: torch.Tensor


def node(entries: dict[str, Node | TensorLeaf], **fields: object) -> Node:
    """A node of batch size [3]."""
    base = Node((3,), None, None, None, tuple(entries.items()))
    return base._replace(**fields)  # type: ignore[arg-type]


def extra_of(root: Node) -> tuple[KeyPath, ...]:
    return plan(Spec(root)).extra_paths


@pytest.mark.parametrize(
    "key", ["a", "", ".", "..", "a/b", "a b", "%", "%20", "\0\x1f\x7f", 'q"<>:|?*\\', "é", "...", "a.memmap"]
)
def test_key_when_encoded_then_as_tensordict_encodes_it(tmp_path: Path, key: str) -> None:
    TensorDict({key: torch.zeros(1)}, []).memmap_like(tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted([encode_key(key) + ".memmap", "meta.json"])


@pytest.mark.parametrize("key", ["shape", "device", "_type"])
def test_key_when_tensordict_loses_it_then_goes_to_extra_at_any_level(key: str) -> None:
    root = node({key: F32, "ok": F32, "sub": node({key: F32, "ok": F32})})
    assert extra_of(root) == ((key,), ("sub", key))
    assert extra_of(node({key: node({"a": F32})})) == ((key, "a"),)


@pytest.mark.parametrize(
    "key", ["_class", "_format_version", "_names", "cls", "size", "leaves", "_total_bytes", "type"]
)
def test_key_when_tensordict_keeps_it_then_stays_in_rows(key: str) -> None:
    assert extra_of(node({key: F32, "n": node({key: F32})})) == ()


def test_key_when_it_hides_the_names_then_goes_to_extra() -> None:
    assert extra_of(node({"_names": F32}, names=("time",))) == (("_names",),)


@pytest.mark.parametrize(
    ("key", "is_carried"), [("x" * 248, True), ("x" * 249, False), ("é" * 124, True), ("/" * 83, False)]
)
def test_key_when_its_file_name_is_too_long_then_goes_to_extra(key: str, is_carried: bool) -> None:
    assert (extra_of(node({key: F32})) == ()) is is_carried


def test_node_when_its_folder_would_hide_a_file_then_goes_to_extra() -> None:
    root = node({"u": F32, "u.memmap": node({"a": F32}), "meta.json": node({"a": F32}), "v.memmap": node({"a": F32})})
    assert extra_of(root) == (("meta.json", "a"), ("u.memmap", "a"))


def test_path_when_it_is_too_deep_for_a_file_name_then_goes_to_extra() -> None:
    root = F32
    for _ in range(12):
        root = node({"x" * 200: root})  # type: ignore[assignment]
    assert len(extra_of(root)) == 1  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "dtype", ["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"]
)
def test_dtype_when_tensordict_cannot_read_it_then_goes_to_extra(dtype: str) -> None:
    assert extra_of(node({"a": TensorLeaf(dtype, (3,))})) == (("a",),)


def test_folder_when_planned_then_its_files_are_those_that_tensordict_writes(tmp_path: Path) -> None:
    local = TensorDict(
        {"a b": torch.zeros(3, 2), "n": {"_class": torch.zeros(3, dtype=torch.bfloat16)}}, [3], names=["t"]
    )
    local["pair"] = Pair(left=torch.zeros(3), right=torch.zeros(3, 0), batch_size=[3])  # type: ignore[call-arg]
    local.memmap_like(tmp_path / "theirs")
    name = f"{Pair.__module__}.{Pair.__qualname__}"
    inner = node({"_class": TensorLeaf("bfloat16", (3,))}, names=("t",))
    pair = node({"left": F32, "right": TensorLeaf("float32", (3, 0))}, names=("t",), tensorclass=name)
    create(
        tmp_path / "ours", Spec(node({"a b": TensorLeaf("float32", (3, 2)), "n": inner, "pair": pair}, names=("t",)))
    )
    ours, theirs = files(tmp_path / "ours" / "rows"), files(tmp_path / "theirs")
    assert ours.pop("pair/_tensordict/right.memmap") == b""  # theirs leaves this one out, and reads it
    assert ours == theirs


def files(folder: Path) -> dict[str, object]:
    """Content by relative name, ``meta.json`` parsed."""
    found: dict[str, object] = {}
    for path in folder.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            found[str(path.relative_to(folder))] = json.loads(content) if path.name == "meta.json" else content
    return found
