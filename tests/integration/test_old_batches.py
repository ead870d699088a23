"""A batch is used after its rows were overwritten: the new rows stay as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.client.tables.extends.extend_coalescer import ExtendCoalescer
from tdserve.structure.trees.tree import Spec

pytestmark = pytest.mark.integration


def rows(*numbers: int) -> TensorDict:
    """Rows of one leaf."""
    return TensorDict({"number": torch.tensor(numbers)}, [len(numbers)])


def create(client: tdserve.Client, name: str) -> Any:
    """A full table of four rows, which all have the same priority."""
    replay = client.create_replay(name, rows(0)[0], 4, sampler=tdserve.Prioritized(alpha=1.0, eps=0.0))
    replay.extend(rows(0, 1, 2, 3))
    return replay


@pytest.mark.parametrize("ends", ["delete", "clear"])
def test_batch_when_its_table_was_made_anew_or_cleared_then_new_rows_are_not_changed(
    client: tdserve.Client, name: str, ends: str
) -> None:
    replay = create(client, name)
    batch = replay.sample(64)
    if ends == "delete":
        client.delete(name)
        create(client, name)
    else:
        replay.clear()
        replay.extend(rows(0, 1, 2, 3))
    assert replay.update_priority(batch, torch.full((64,), 9.0)) == 64
    with pytest.raises(tdserve.SelectionError, match="overwritten since it was read"):
        replay.set_at_("number", batch["number"] + 9, batch)
    after = replay.sample(64)
    assert set(after["number"].tolist()) == {0, 1, 2, 3}
    assert set(after["priority"].tolist()) == {1.0}


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [2, 8])
@pytest.mark.parametrize("first", ["extend", "sample", "read"])
def test_handle_when_its_table_was_made_anew_with_another_capacity_then_follows(
    client: tdserve.Client, name: str, first: str, capacity: int
) -> None:
    replay = create(client, name)
    replay.sample(2)
    client.delete(name)
    anew = client.create_replay(name, rows(0)[0], capacity)
    anew.extend(rows(7))
    calls: dict[str, Any] = {
        "extend": lambda: replay.extend(rows(8)),
        "sample": lambda: replay.sample(1),
        "read": lambda: replay[:],
    }
    calls.pop(first)()
    for call in calls.values():
        call()
    replay.extend(rows(9))
    assert 9 in anew[:]["number"].tolist()
    assert replay.capacity == capacity
    assert replay.extend(rows(*range(capacity + 1))).tolist().count(-1) == 1


def test_handle_when_two_threads_follow_its_table_then_both_extends_are_stored_and_later_ones(
    client: tdserve.Client, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    replay = create(client, name)
    client.delete(name)
    anew = client.create_replay(name, rows(0)[0], 8)
    prepend, inner = Spec.prepend, list[Any]()

    def prepend_late(spec: Spec, batch_size: tuple[int, ...]) -> Spec:
        if batch_size == (8,) and not inner:  # the handle has a part of what it needs
            inner.append(None)
            inner.append(replay.extend(rows(7)))
        return prepend(spec, batch_size)

    monkeypatch.setattr(Spec, "prepend", prepend_late)
    replay.extend(rows(8))
    replay.extend(rows(9))
    assert len(inner) == 2
    assert sorted(anew[:]["number"].tolist()) == [7, 8, 9]


def test_handle_when_it_follows_while_another_thread_prepares_to_extend_then_later_extends_are_stored(
    client: tdserve.Client, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(client, name)
    replay = client.replay(name)
    client.delete(name)
    anew = client.create_replay(name, rows(0)[0], 8)
    anew.extend(rows(6))
    make, has_followed = ExtendCoalescer.from_table, list[int]()

    def make_late(*arguments: Any, **options: Any) -> Any:
        made = make(*arguments, **options)
        if not has_followed:
            has_followed.append(len(replay.sample(1)))
        return made

    monkeypatch.setattr(ExtendCoalescer, "from_table", make_late)
    for number in (7, 8):
        replay.extend(rows(number))
    assert has_followed
    assert sorted(anew[:]["number"].tolist()) == [6, 7, 8]


def test_handle_when_its_table_was_made_anew_for_other_rows_then_spec_mismatch(
    client: tdserve.Client, name: str
) -> None:
    replay = create(client, name)
    client.delete(name)
    client.create_replay(name, rows(0)[0].to(torch.float32), 8)
    calls: list[Any] = [lambda: replay.extend(rows(8)), lambda: replay.sample(1), lambda: replay[:]]
    for call in calls:
        with pytest.raises(tdserve.SpecMismatchError, match="older table of this name; open it again"):
            call()
