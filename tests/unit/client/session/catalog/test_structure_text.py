"""A structure as a tree, as tensordicts show theirs, and as a Composite where torchrl is installed."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from typing import Any

import pytest
import torch
from tensordict import TensorDict, lazy_stack

from tdserve.base.errors import NotSupportedError
from tdserve.client.session.catalog.structure_text import format_repr, format_tree, make_composite
from tdserve.structure.captures.capture import capture
from tdserve.structure.trees.nodes import Form, Node, Ragged, TensorLeaf, ValueLeaf
from tests.processes import REPOSITORY

EXPECTED = """\
store: TensorDict[2], names ['time'], on cpu, locked
├─ w: float32[2, 3], parameter, requires grad
├─ 'a b': TensorDict[2], names ['time'], on cpu, locked
│  └─ text: non-tensor[2]
└─ rows: TensorDict[2], names ['time'], on cpu, lazy stack along 0, locked
   └─ x: ragged float32[2, -1]"""

EXPECTED_REPR = """StoreHandle(
    'frames' at host:1,
    fields={
        a: Tensor(shape=torch.Size([4, 2]), device=cpu, dtype=torch.float32, is_shared=False),
        each: NonTensorStack(batch_size=torch.Size([4]), device=None),
        empty: Inner(
            fields={
            },
            batch_size=torch.Size([4]),
            device=None,
            is_shared=False),
        lazy: LazyStackedTensorDict(
            fields={
                r: Tensor(shape=torch.Size([4, -1]), device=cpu, dtype=torch.int64, is_shared=False)},
            batch_size=torch.Size([4]),
            device=None,
            is_shared=False,
            stack_dim=0),
        one: NonTensorData(batch_size=torch.Size([4]), device=None)},
    batch_size=torch.Size([4]),
    device=None,
    is_shared=False)"""

PROGRAM = """
import warnings
warnings.simplefilter("ignore")
import torch
from torchrl.data import Composite, NonTensor
from tensordict import TensorDict, lazy_stack
from tdserve.client.session.catalog.structure_text import make_composite
from tdserve.structure.captures.capture import capture
flags = {"flag": torch.zeros(2, dtype=torch.bool)}
td = TensorDict({"x": torch.zeros(2, 3, dtype=torch.int16), "n": flags, "t": "a"}, [2])
td["rows"] = lazy_stack([TensorDict({"r": torch.zeros(size)}) for size in (1, 2)])
td["keys"] = lazy_stack([TensorDict({"r": torch.zeros(1)}), TensorDict({"s": torch.zeros(1)})])
found = make_composite(capture(td).spec.root)
assert type(found) is Composite and found.shape == (2,), found
assert (found["x"].shape, found["x"].dtype) == ((2, 3), torch.int16)
assert found["n", "flag"].dtype == torch.bool
assert type(found["t"]) is NonTensor
assert found["rows", "r"].shape == (2, -1)
assert set(found["keys"].keys()) == {"r", "s"}
assert found["x"].rand().shape == (2, 3)
print("whole")
"""


def example() -> Any:
    """Returns a tensordict with every kind of entry that a tree shows."""
    rows = lazy_stack([TensorDict({"x": torch.zeros(size)}, device="cpu") for size in (1, 2)])
    entries = {"w": torch.nn.Parameter(torch.zeros(2, 3)), "a b": {"text": "one"}, "rows": rows}
    return TensorDict(entries, [2], names=["time"], device="cpu").lock_()


def test_tree_when_there_are_entries_of_all_kinds_then_a_line_for_each() -> None:
    assert format_tree("store", capture(example(), is_exact=True).spec.root) == EXPECTED


@pytest.mark.skipif(importlib.util.find_spec("torchrl") is None, reason="torchrl is not installed")
def test_composite_when_torchrl_is_there_then_of_the_same_structure() -> None:
    """Runs in a process of its own: importing torchrl changes the process."""
    command = [sys.executable, "-m", "tests.lent.spawned", "-c", PROGRAM]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=100, cwd=REPOSITORY)
    assert done.stdout.endswith("whole\n"), done.stderr


def test_composite_when_torchrl_is_missing_then_the_error_names_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torchrl", None)
    monkeypatch.setitem(sys.modules, "torchrl.data", None)
    with pytest.raises(NotSupportedError, match="install torchrl"):
        make_composite(capture(example()).spec.root)


def test_repr_of_when_shown_then_as_tensordicts_show_themselves() -> None:
    ragged = ValueLeaf((4,), True, Ragged(Form.STACK, "int64", (-1,)))
    entries = (
        ("one", ValueLeaf((4,), False)),
        ("a", TensorLeaf("float32", (4, 2))),
        ("empty", Node((4,), None, None, "some.module.Inner", ())),
        ("each", ValueLeaf((4,), True)),
        ("lazy", Node((4,), None, None, None, (("r", ragged),), stack_dim=0)),
    )
    shown = format_repr("'frames' at host:1", Node((4,), None, None, None, entries), kind="StoreHandle", device=None)
    assert shown == EXPECTED_REPR
