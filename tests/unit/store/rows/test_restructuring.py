from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path as FilePath

import pytest
import torch
from tensordict import TensorDict

from tdserve.store.rows import leaf_folders, restructuring
from tdserve.store.rows.mapping import open_leaves
from tdserve.store.rows.restructuring import FileChange, carry_out, keep, plan_file_change
from tdserve.structure.captures.capture import capture
from tdserve.structure.trees.altering import Alteration, Renaming
from tdserve.structure.trees.tree import Spec

TD = TensorDict(
    {"a": torch.arange(3.0), "n": {"b": torch.arange(6).view(3, 2)}, "shape": torch.arange(3), "device": torch.ones(3)},
    [3],
)
ADDED = TensorDict({"z": torch.full((3,), 7.0), "n": {"_type": torch.full((3,), 8)}, "m": {"d": torch.ones(3)}}, [3])

REMOVED = Alteration(removed=(("n",), ("device",)))
SWAPPED = Alteration(renamed=(Renaming(("shape",), ("k",)), Renaming(("a",), ("shape",)), Renaming(("k",), ("a",))))
ALL = Alteration(removed=(("device",),), renamed=(Renaming(("n",), ("q", "x")),), added=capture(ADDED).spec)
REPLACED = Alteration(added=capture(TensorDict({"a": torch.zeros(3, 5)}, [3])).spec, replaces=frozenset([("a",)]))


def fill(folder: FilePath, td: TensorDict) -> Spec:
    """Makes the files of a tensordict."""
    captured = capture(td)
    leaf_folders.create(folder, captured.spec)
    for path, leaf in open_leaves(folder, captured.spec).items():
        leaf.copy_(captured.tensors[path])
    return captured.spec


def expected(alteration: Alteration) -> TensorDict:
    """What tensordict makes of the same steps."""
    td = TD.clone()
    for path in alteration.removed:
        td.del_(path)
    for each in alteration.renamed:
        td.rename_key_(each.old, each.new)
    if alteration.added is not None:
        td.update(ADDED if alteration.added == capture(ADDED).spec else {"a": torch.zeros(3, 5)})
    return td


class CrashError(Exception):
    """Stands for kill -9."""


@pytest.fixture
def store(tmp_path: FilePath) -> FilePath:
    """A store's folder."""
    return tmp_path / "store"


def prepared(store: FilePath, alteration: Alteration) -> tuple[FilePath, FileChange, Spec]:
    """A store, and all that is made before its structure changes."""
    spec = fill(store, TD)
    folder = store / f"{restructuring.PREFIX}1"
    if alteration.added is not None:
        fill(folder, ADDED if alteration.added == capture(ADDED).spec else TensorDict({"a": torch.zeros(3, 5)}, [3]))
    altered = alteration.apply(spec)
    change = plan_file_change(spec, altered.spec, altered.origins, alteration.added)
    keep(store, folder, change, altered.spec)
    return folder, change, altered.spec


def check(store: FilePath, new: Spec, td: TensorDict) -> None:
    """The store is as if it had been made with this structure, and has the content."""
    found = open_leaves(store, new)
    for path, tensor in capture(td).tensors.items():
        assert torch.equal(found[path], tensor), path
    fresh = store.with_name("fresh")
    leaf_folders.create(fresh, new)
    assert contents(store) == contents(fresh)
    plain = TensorDict.load_memmap(store / "rows", allow_pickle=False)
    for key in plain.keys(True, True):
        assert torch.equal(plain[key], td[key])


def contents(folder: FilePath) -> dict[str, bytes]:
    """Names of all files, and what is in the small ones."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        found[name] = path.read_bytes() if path.suffix == ".json" else b""
    return found


@pytest.mark.parametrize("alteration", [REMOVED, SWAPPED, ALL, REPLACED], ids=["removed", "swapped", "all", "replaced"])
def test_carry_out_when_done_then_the_files_are_those_of_the_new_structure(
    store: FilePath, alteration: Alteration
) -> None:
    folder, change, new = prepared(store, alteration)
    old = open_leaves(store, capture(TD).spec)
    assert FileChange.from_json(change.to_json()) == change
    carry_out(store, folder, change)
    restructuring.remove(folder)
    check(store, new, expected(alteration))
    for path, tensor in capture(TD).tensors.items():  # what was mapped before stays as it was
        assert torch.equal(old[path], tensor)
    assert restructuring.list_leftovers(store) == []


@pytest.mark.slow
@pytest.mark.parametrize("alteration", [REMOVED, SWAPPED, ALL, REPLACED], ids=["removed", "swapped", "all", "replaced"])
def test_carry_out_when_cut_short_at_any_step_then_done_again(
    tmp_path: FilePath, alteration: Alteration, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_steps = 0
    while True:
        store = tmp_path / str(num_steps) / "store"
        store.parent.mkdir()
        folder, change, new = prepared(store, alteration)
        with monkeypatch.context() as patch:
            crash_at(num_steps, patch)
            try:
                carry_out(store, folder, change)
                break
            except CrashError:
                num_steps += 1
        carry_out(store, folder, change)
        restructuring.remove(folder)
        check(store, new, expected(alteration))
    assert num_steps > 1


def crash_at(number: int, patch: pytest.MonkeyPatch) -> None:
    """Ends everything before a step of this number."""
    num_seen = 0

    def crashing(does: Callable[..., object]) -> Callable[..., object]:
        def step(*arguments: object, **named: object) -> object:
            nonlocal num_seen
            if num_seen == number:
                raise CrashError
            num_seen += 1
            return does(*arguments, **named)

        return step

    patch.setattr("os.replace", crashing(os.replace))
    for name in ("mkdir", "unlink", "rmdir", "write_bytes"):
        patch.setattr(FilePath, name, crashing(getattr(FilePath, name)))


def test_file_change_when_nothing_moves_then_nothing_is_done(store: FilePath) -> None:
    spec = fill(store, TD)
    altered = Alteration().apply(spec)
    assert plan_file_change(spec, altered.spec, altered.origins, None) == FileChange((), (), (), (), (), ())
