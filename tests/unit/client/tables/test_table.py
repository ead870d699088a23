from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.base.errors import (
    InvalidRequestError,
    KeyNotFoundError,
    SelectionError,
    SpecMismatchError,
    WrongStateError,
)


def rows(num_rows: int, start: int = 0) -> TensorDict:
    """Rows that tell which they are."""
    number = torch.arange(start, start + num_rows)
    return TensorDict({"a": number, "n": {"b": 10.0 * number}, "g": number // 2}, [num_rows])


@pytest.fixture
def table(client: tdserve.Client, name: str) -> tdserve.ReplayHandle:
    """A ring of eight rows, five of them live."""
    made: tdserve.ReplayHandle = client.create_replay(name, rows(1)[0], 8)
    made.extend(rows(5))
    return made


def test_table_when_shown_then_names_itself_and_its_server(client: tdserve.Client, table: tdserve.ReplayHandle) -> None:
    assert repr(table) == f"<ReplayHandle {table.name!r} capacity=8 at {client.address}>"


def test_extend_when_leaves_are_missing_then_they_are_written_later(table: tdserve.ReplayHandle) -> None:
    index = table.extend(rows(2, 5).exclude(("n", "b")))
    assert table[index]["n", "b"].tolist() == [0, 0]
    table.set_at_(("n", "b"), torch.tensor([50.0, 60.0]), index)
    assert table[index]["n", "b"].tolist() == [50, 60]


@pytest.mark.parametrize(
    ("index", "remedy"),
    [
        (torch.ones(8, dtype=torch.bool), r"mask\.nonzero\(\)"),
        (slice(0, 2), r"torch\.arange"),
        (torch.ones(2), "give integers"),
    ],
    ids=["mask", "slice", "floats"],
)
def test_set_at_when_the_index_is_no_row_numbers_then_error_has_table_and_remedy(
    table: tdserve.ReplayHandle, index: Any, remedy: str
) -> None:
    before = table[:5]["a"]
    with pytest.raises(InvalidRequestError, match=rf"table '{table.name}'.*{remedy}"):
        table.set_at_("a", torch.tensor(7), index)
    assert table[:5]["a"].equal(before)


@pytest.mark.parametrize(
    "batch", [rows(2).exclude("a").set("z", torch.zeros(2)), TensorDict({}, [2]), rows(2).set("z", torch.zeros(2))]
)
def test_extend_when_leaves_are_unknown_or_none_then_refused(table: tdserve.ReplayHandle, batch: TensorDict) -> None:
    with pytest.raises(SpecMismatchError, match=table.name):
        table.extend(batch)
    assert table.info()["inserts"] == 5


def test_extend_when_batches_of_several_structures_follow_one_another_then_each_is_looked_at(
    table: tdserve.ReplayHandle,
) -> None:
    for start in (5, 20):
        for number in range(2):
            index = table.extend(rows(2, start + number))
            assert table[index]["a"].tolist() == [start + number, start + number + 1]
        with pytest.raises(SpecMismatchError, match="'n'"):
            table.extend(TensorDict({"a": torch.arange(2), "n": {"b": torch.zeros(2, 3)}, "g": torch.arange(2)}, [2]))
        index = table.extend(rows(2, start).exclude(("n", "b")))
        assert not set(table.sample(50)["index"].tolist()) & set(index.tolist())  # they are not whole


@pytest.mark.parametrize("ends", [[0, 1], np.ones(3, np.bool_), "end", torch.ones(2)])
def test_extend_when_ends_are_none_then_refused(table: tdserve.ReplayHandle, ends: Any) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        table.extend(rows(2), ends=ends)
    assert raised.value.argument == "ends"
    assert table.info()["inserts"] == 5


@pytest.mark.parametrize("index", [[0, 3], torch.tensor([3, 0, 3]), np.array([[0], [3]])])
def test_delete_when_of_live_rows_then_gone_and_counted_once(table: tdserve.ReplayHandle, index: Any) -> None:
    assert table.delete(index) == 2
    assert table[:]["a"].tolist() == [1, 2, 4]
    assert table.extend(rows(3, 5)).shape == (3,)
    assert sorted(table[:]["a"].tolist()) == [1, 2, 4, 5, 6, 7]


@pytest.mark.parametrize("index", [[0, 5], [8], [-1]])
def test_delete_when_a_row_is_not_live_then_error_and_all_stay(table: tdserve.ReplayHandle, index: Any) -> None:
    with pytest.raises(SelectionError):
        table.delete(index)
    assert len(table) == 5


def test_clear_when_done_then_empty_and_goes_on(table: tdserve.ReplayHandle) -> None:
    assert (table.clear(), table.clear()) == (5, 0)
    assert len(table) == 0
    assert len(table.extend(rows(8))) == 8


def test_counts_when_answers_have_them_then_known_without_asking_and_begin_anew_when_cleared(
    table: tdserve.ReplayHandle,
) -> None:
    table.clear(reset_counts=True)
    assert table.counts() == (0, 0)
    table.extend(rows(3))
    assert table.counts() == (3, 3) == (len(table), table.info()["inserts"])
    table.clear()
    assert table.counts() == (0, 3)
    assert table.clear(reset_counts=True) == 0
    assert table.counts() == (0, 0)
    assert table.info()["inserts"] == 0


def test_set_limiter_when_it_could_let_nothing_through_then_refused(table: tdserve.ReplayHandle) -> None:
    with pytest.raises(InvalidRequestError):
        table.set_limiter(tdserve.MinSize(9))
    assert table.settings.limiter == tdserve.MinSize(1)
    table.set_limiter(tdserve.MinSize(5))
    assert table.settings.limiter == tdserve.MinSize(5)
    assert table.info()["settings"]["limiter"] == {"kind": "min_size", "min_size": 5}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"require": "c"}, KeyNotFoundError),
        ({"require": ("a", "c")}, KeyNotFoundError),
        ({"require": (3,)}, InvalidRequestError),
        ({"group_by": "c", "group_size": 2}, KeyNotFoundError),
        ({"group_by": "g"}, InvalidRequestError),
        ({"group_by": "g", "group_size": 9}, InvalidRequestError),
        ({"group_size": 2}, InvalidRequestError),
        ({"group_by": "g", "group_size": 3}, InvalidRequestError),
        ({"consumer": 3}, InvalidRequestError),
    ],
)
def test_sample_when_the_question_is_none_then_refused(
    table: tdserve.ReplayHandle, arguments: dict[str, Any], error: type[Exception]
) -> None:
    for ask in (table.sample, lambda num_rows, **more: next(table.batches(num_rows, timeout_s=20.0, **more))):
        with pytest.raises(error):
            ask(4, **arguments)
    assert table.info()["samples"] == 0


def test_sample_when_keys_are_required_then_by_a_name_or_a_path(table: tdserve.ReplayHandle) -> None:
    index = table.extend(rows(2, 5).exclude(("n", "b")))
    every: tuple[Any, ...] = ("a", ("a", "g"), [("a",), ("g",)])
    whole: tuple[Any, ...] = (None, [("n", "b")], [("n",)], ("a", ("n", "b")))
    for require in every:
        assert set(table.sample(200, require=require)["a"].tolist()) == set(range(7))
    for require in whole:
        assert set(table.sample(200, require=require)["a"].tolist()) == set(range(5))
    assert set(table.sample(200, require=())["index"].tolist()) >= set(index.tolist())


def test_extend_when_closed_then_refused(table: tdserve.ReplayHandle) -> None:
    table.close()
    with pytest.raises(WrongStateError, match="closed"):
        table.extend(rows(1))
    assert len(table.sample(4)) == 4
    assert table.info()["is_closed"]


def test_getitem_when_of_several_dimensions_then_rows_in_that_shape(table: tdserve.ReplayHandle) -> None:
    found = table[torch.tensor([[0, 1, 2], [4, 3, 2]])]
    assert found.batch_size == (2, 3)
    assert found["a"].tolist() == [[0, 1, 2], [4, 3, 2]]
