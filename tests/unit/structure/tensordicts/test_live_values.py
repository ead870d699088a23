from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from tdserve.base.errors import StoreNotFoundError, WrongStateError
from tdserve.structure.captures.capture import capture
from tdserve.structure.tensordicts.live_values import LiveNonTensorData, LiveNonTensorStack, is_view, make_live_entry
from tests.tensordict_versions import skip_old
from tests.unit.structure.memory_source import Cell, MemorySource

Pair = tuple[TensorDict, Cell, Cell]


@pytest.fixture
def pair() -> Pair:
    """A locked tensordict of two rows with a live single value "a" and a live stack of "b" and "c"."""
    one, rows = Cell(NonTensorData("a", batch_size=[2])), Cell(NonTensorStack("b", "c"))
    entries = {
        "one": make_live_entry(MemorySource(one), [2]),
        "rows": make_live_entry(MemorySource(rows), [2], is_stack=True),
        "x": torch.zeros(2),
    }
    return TensorDict(entries, [2]).lock_(), one, rows


def test_entries_when_looked_at_then_are_of_tensordicts_own_kinds(pair: Pair) -> None:
    td, _, _ = pair
    assert isinstance(td.get("one"), NonTensorData)
    assert isinstance(td.get("rows"), NonTensorStack)
    assert (td["one"], td["rows"], td.to_dict()["rows"]) == ("a", ["b", "c"], ["b", "c"])


def test_entries_when_the_source_changes_then_the_next_look_shows_it(pair: Pair) -> None:
    td, one, rows = pair
    held, stack = td.get("one"), td.get("rows")
    one.entry, rows.entry = NonTensorData({"n": 1}, batch_size=[2]), NonTensorStack("d", "e")
    assert held.data == td["one"] == {"n": 1}
    assert (stack.tolist(), stack[1].data, td[0]["rows"]) == (["d", "e"], "e", "d")


def test_stack_when_listed_then_reads_once(pair: Pair) -> None:
    td, _, rows = pair
    td.get("rows").tolist()
    assert rows.reads == 1


WRITES: dict[str, tuple[Callable[[Any], Any], str, Any]] = {
    "set_": (lambda td: td.set_("one", "z"), "one", ["z", "z"]),
    "set in place": (lambda td: td.set("one", "z", inplace=True), "one", ["z", "z"]),
    "update_": (lambda td: td.update_({"one": "z"}), "one", ["z", "z"]),
    "update in place": (lambda td: td.update({"one": "z"}, inplace=True), "one", ["z", "z"]),
    "update of the leaf": (lambda td: td.get("one").update(NonTensorData("z"), inplace=True), "one", ["z", "z"]),
    "update_ of the leaf": (lambda td: td.get("one").update_(NonTensorData("z")), "one", ["z", "z"]),
    "copy_ of the leaf": (lambda td: td.get("one").copy_(NonTensorData("z")), "one", ["z", "z"]),
    "data of the leaf": (lambda td: setattr(td.get("one"), "data", "z"), "one", ["z", "z"]),
    "a list as the value": (lambda td: td.get("one").update_(["y", "z"]), "one", [["y", "z"]] * 2),
    "set_ of one row": (lambda td: td[1].set_("one", "z"), "one", ["a", "z"]),
    "set_at_": (lambda td: td.set_at_("one", "z", 0), "one", ["z", "a"]),
    "set_ of a stack": (lambda td: td.set_("rows", ["y", "z"]), "rows", ["y", "z"]),
    "update_ of a stack": (lambda td: td.update_({"rows": ["y", "z"]}), "rows", ["y", "z"]),
    "set_at_ of a stack": (lambda td: td.set_at_("rows", "z", 1), "rows", ["b", "z"]),
    "update of the stack": (
        lambda td: td.get("rows").update(NonTensorStack("y", "z"), inplace=True),
        "rows",
        ["y", "z"],
    ),
    "one for all rows": (lambda td: td.get("rows").update_(NonTensorData("z", batch_size=[2])), "rows", ["z", "z"]),
    "item of the stack": (lambda td: td.get("rows").__setitem__(1, "z"), "rows", ["b", "z"]),
    "masked items": (lambda td: td.get("rows").__setitem__(torch.tensor([True, False]), ["z"]), "rows", ["z", "c"]),
    "item of the list": (lambda td: td["rows"].__setitem__(0, "z"), "rows", ["z", "c"]),
    "row of the stack": (lambda td: td.get("rows")[0].update_(NonTensorData("z")), "rows", ["z", "c"]),
    "part of the stack": (lambda td: td[0:1].get("rows").update_(NonTensorStack("z")), "rows", ["z", "c"]),
    "update_at_ of the stack": (lambda td: td.get("rows").update_at_("z", 0), "rows", ["z", "c"]),
}


@pytest.mark.parametrize("way", WRITES)
def test_entry_when_updated_in_place_then_one_write_goes_through(pair: Pair, way: str) -> None:
    td, one, rows = pair
    work, key, expected = WRITES[way]
    work(td)
    cell = {"one": one, "rows": rows}[key]
    assert (cell.entry.tolist(), cell.writes) == (expected, 1)
    assert td.get(key).tolist() == expected


SHARING: dict[str, Callable[[Any], Any]] = {
    "shallow clone": lambda td: td.clone(recurse=False),
    "copy": copy.copy,
    "select": lambda td: td.select("one", "rows"),
    "slice": lambda td: td[0:2],
    "ellipsis": lambda td: td[...],
    "pickle": lambda td: pickle.loads(pickle.dumps(td)),
    "lock": lambda td: td.clone(False).lock_().unlock_(),
    "share_memory_": lambda td: td.clone(False).unlock_().share_memory_(),
}
COPYING: dict[str, Callable[[Any], Any]] = {
    "clone": lambda td: td.clone(),
    "deepcopy": copy.deepcopy,
    "mask": lambda td: td[torch.tensor([True, True])],
    "list": lambda td: td[[0, 1]],
    "to": lambda td: td.to(torch.float64),
    "apply": lambda td: td.apply(lambda leaf: leaf + 1),
    "where": lambda td: td.where(torch.tensor([True, True]), td.clone()),
    "zeros_like": torch.zeros_like,
    "memmap": lambda td: td.memmap(),
}


@pytest.mark.parametrize("way", SHARING)
def test_entry_when_an_operation_shares_memory_then_stays_live(pair: Pair, way: str) -> None:
    other = SHARING[way](pair[0])
    assert type(other.get("one")) is LiveNonTensorData
    assert type(other.get("rows")) is LiveNonTensorStack


@pytest.mark.parametrize("way", COPYING)
def test_entry_when_an_operation_copies_then_is_plain_and_equal(pair: Pair, way: str) -> None:
    other = COPYING[way](pair[0])
    assert type(other.get("one")) is NonTensorData
    assert type(other.get("rows")) is NonTensorStack
    assert (other["one"], other["rows"]) == ("a", ["b", "c"])


def test_row_when_taken_by_int_or_unbind_then_is_live(pair: Pair) -> None:
    td, one, rows = pair
    single, (_, second) = td[1], td.unbind(0)
    one.entry, rows.entry = NonTensorStack("p", "q"), NonTensorStack("r", "s")
    assert (single["one"], single["rows"], second["one"], second["rows"]) == ("q", "s", "q", "s")


RESHAPING: dict[str, tuple[Callable[[Any], Any], list[Any]]] = {
    "view": (lambda td: td.view(1, 2), [["b", "c"]]),
    "reshape": (lambda td: td.reshape(2, 1), [["b"], ["c"]]),
    "unsqueeze": (lambda td: td.unsqueeze(0), [["b", "c"]]),
    "expand": (lambda td: td.expand(2, 2), [["b", "c"]] * 2),
    "stack": (lambda td: torch.stack([td, td]), [["b", "c"]] * 2),
    "cat": (lambda td: torch.cat([td, td]), ["b", "c", "b", "c"]),
    "split": (lambda td: td.split(1)[1], ["c"]),
    "gather": (lambda td: td.gather(0, torch.tensor([1, 1])), ["c", "c"]),
}


@pytest.mark.parametrize(
    "way",
    [pytest.param(way, marks=skip_old("gathers no non-tensor values") if way == "gather" else ()) for way in RESHAPING],
)
def test_stack_when_reshaped_then_keeps_its_values(pair: Pair, way: str) -> None:
    work, expected = RESHAPING[way]
    assert work(pair[0]).get("rows").tolist() == expected


def test_update_when_locked_and_not_in_place_then_refuses_as_tensordict_does(pair: Pair) -> None:
    td, one, _ = pair
    with pytest.raises(WrongStateError, match="locked"):
        td.get("one").update(NonTensorData("z"))
    with pytest.raises(WrongStateError, match="locked"):
        td.get("rows").update(NonTensorStack("y", "z"))
    assert one.writes == 0


def test_data_when_rows_were_given_different_values_then_wrong_state_and_tolist_has_them(pair: Pair) -> None:
    td, one, _ = pair
    one.entry = NonTensorStack("p", "q")
    with pytest.raises(WrongStateError, match="tolist"):
        _ = td.get("one").data
    assert td.get("one").tolist() == ["p", "q"]
    one.entry = NonTensorStack("p", "p")
    assert td["one"] == "p"


def test_stack_when_of_two_dimensions_then_reads_and_writes_below() -> None:
    rows: list[Any] = [["a", "b", "c"], ["d", "e", "f"]]
    cell = Cell(NonTensorStack.from_list(rows))
    stack = make_live_entry(MemorySource(cell), [2, 3], is_stack=True)
    assert (stack[1].tolist(), stack[1][2].data, stack.tensordicts[0].tolist()) == (
        ["d", "e", "f"],
        "f",
        ["a", "b", "c"],
    )
    stack[1].update_(NonTensorStack("x", "y", "z"))
    assert stack.tolist() == [["a", "b", "c"], ["x", "y", "z"]]


def test_stack_when_empty_then_has_no_rows() -> None:
    stack = make_live_entry(MemorySource(Cell(NonTensorStack("a", "b")[0:0])), [0], is_stack=True)
    assert (stack.tensordicts, stack.tolist(), len(stack)) == ([], [], 0)


def test_stack_when_locked_then_makes_no_rows(pair: Pair) -> None:
    td, _, rows = pair
    td.unlock_()
    td.lock_()
    assert td.get("rows").is_locked
    assert (rows.selects, rows.reads) == (0, 0)


def test_names_and_device_when_given_then_are_kept() -> None:
    device = torch.device("cpu")
    for is_stack in (False, True):
        entry = make_live_entry(MemorySource(Cell(NonTensorStack("a", "b"))), [2], device, ["time"], is_stack)
        assert (entry.names, entry.device) == (["time"], device)
        assert copy.copy(entry).names == ["time"]


def test_capture_when_entries_are_live_then_takes_what_they_are_now(pair: Pair) -> None:
    td, one, rows = pair
    one.entry = NonTensorStack("p", "q")
    captured = capture(td)
    assert captured.values == {("one",): ["p", "q"], ("rows",): ["b", "c"]}
    assert {path: leaf.per_row for path, leaf in captured.spec.values} == {("one",): True, ("rows",): True}
    assert one.reads == rows.reads == 1


def test_repr_when_the_source_is_gone_then_has_the_reason(pair: Pair) -> None:
    class Gone(MemorySource):
        def read(self) -> Any:
            raise StoreNotFoundError(name="batch")

    for is_stack in (False, True):
        entry = make_live_entry(Gone(pair[1]), [2], is_stack=is_stack)
        assert "no store 'batch'" in repr(entry)
        with pytest.raises(StoreNotFoundError):
            entry.tolist()


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        *((index, True) for index in (0, slice(1, 2), slice(0, 4, 2), ..., (0, slice(None)))),
        *((index, False) for index in ([0], None, True, torch.tensor(0), slice(None, None, -1))),
    ],
)
def test_is_view_when_torch_would_copy_then_false(index: Any, expected: bool) -> None:
    assert is_view(index) is expected
