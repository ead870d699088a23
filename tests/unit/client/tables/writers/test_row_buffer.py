from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from tensordict import TensorDict

from tdserve.base.errors import InvalidRequestError
from tdserve.client.tables.writers.row_buffer import NO_PRIORITY, NO_VERSION, Batch, Page, RowBuffer
from tdserve.structure.building.build import build
from tdserve.structure.captures.capture import capture
from tdserve.structure.captures.rows import RowReader, RowSlots
from tdserve.structure.trees.tree import check_matches
from tests.sameness import same_value
from tests.tensordict_strategies import tensordicts

SPEC = capture(TensorDict({"x": torch.tensor(0)})).spec
ROW_BYTES = RowSlots.compute_nbytes(SPEC, 1)


def buffer(page_rows: int = 3, num_rows: int = 1000) -> RowBuffer:
    """Makes a buffer for rows of one number, with room for so many."""
    return RowBuffer(SPEC, page_rows=page_rows, max_bytes=num_rows * ROW_BYTES)


def put(subject: RowBuffer, *numbers: int, stream: int = 1, priority: float = NO_PRIORITY) -> Page:
    """Rows of these numbers; each is as old as its number."""
    page = None
    for number in numbers:
        page = subject.find_page(stream)
        assert page is not None
        page.put([torch.tensor(number)], priority, float(number))
    assert page is not None
    return page


def numbers_of(batch: Batch) -> list[int]:
    """The numbers of its rows, in order."""
    return [number for captured in batch.captured for number in captured.tensors[("x",)].tolist()]


def take_numbers(subject: RowBuffer, max_rows: int = 1000) -> list[int]:
    """The numbers of the next batch, which is given back at once."""
    batch = subject.take(max_rows)
    found = numbers_of(batch)
    assert batch.num_rows == len(found)
    subject.give_back(batch)
    return found


def all_taken(subject: RowBuffer, max_rows: int = 1000) -> list[list[int]]:
    """Takes all batches that wait."""
    found = []
    while subject.num_waiting:
        found.append(take_numbers(subject, max_rows))
    return found


def test_take_when_rows_lie_in_several_pages_then_joined_in_order() -> None:
    subject = buffer(page_rows=3)
    put(subject, *range(8))
    assert subject.num_waiting == 8
    assert take_numbers(subject) == list(range(8))
    assert subject.num_waiting == 0


@pytest.mark.parametrize("max_rows", [1, 2, 3, 4, 7, 8, 9])
def test_take_when_limited_then_the_oldest_and_the_rest_later(max_rows: int) -> None:
    subject = buffer(page_rows=3)
    put(subject, *range(8))
    numbers = list(range(8))
    assert all_taken(subject, max_rows) == [numbers[start : start + max_rows] for start in range(0, 8, max_rows)]


def test_take_when_rows_lie_in_pages_then_shares_their_memory() -> None:
    subject = buffer(page_rows=2)
    pages = [put(subject, 1, 2), put(subject, 3)]
    batch = subject.take(10)
    found = [captured.tensors[("x",)].data_ptr() for captured in batch.captured]
    assert found == [page.slots.tensors[0].data_ptr() for page in pages]


@pytest.mark.parametrize("start", [0, 1, 3, 4])
@pytest.mark.parametrize("stop", [5, 6, 7])
def test_cut_when_rows_lie_in_pages_then_those_rows(start: int, stop: int) -> None:
    subject = buffer(page_rows=3)
    put(subject, *range(7))
    batch = subject.take(10)
    pieces = batch.cut(slice(start, stop))
    assert [number for each in pieces for number in each.tensors[("x",)].tolist()] == list(range(start, stop))
    assert all(len(each.tensors[("x",)]) == each.spec.batch_size[0] for each in pieces)


def test_take_when_a_page_is_sent_in_part_then_rows_still_come_behind_it() -> None:
    subject = buffer(page_rows=4)
    page = put(subject, 0, 1)
    first = subject.take(10)
    assert put(subject, 2) is page
    assert numbers_of(first) == [0, 1]
    subject.give_back(first)
    put(subject, 3, 4)
    assert take_numbers(subject) == [2, 3, 4]


def test_take_when_streams_differ_then_never_in_one_batch() -> None:
    subject = buffer(page_rows=4)
    put(subject, 0, 1, stream=1)
    put(subject, 2, stream=2)
    put(subject, 3, 4, 5, stream=3)
    batches = [subject.take(10)]
    while subject.num_waiting:
        subject.give_back(batches[-1])
        batches.append(subject.take(10))
    assert [batch.stream for batch in batches] == [1, 2, 3]
    assert [batch.num_rows for batch in batches] == [2, 1, 3]


def test_take_when_only_some_have_a_priority_then_never_in_one_batch() -> None:
    subject = buffer(page_rows=4)
    put(subject, 0, 1)
    put(subject, 2, 3, 4, 5, priority=0.5)
    put(subject, 6)
    found: list[Any] = []
    while subject.num_waiting:
        batch = subject.take(10)
        found.append((numbers_of(batch), None if batch.priorities is None else batch.priorities.tolist()))
        subject.give_back(batch)
    assert found == [([0, 1], None), ([2, 3, 4, 5], [0.5] * 4), ([6], None)]


def test_take_when_a_row_ends_its_trajectory_then_marked() -> None:
    subject = buffer(page_rows=2)
    put(subject, 0)
    assert subject.take(1).ends is None
    subject = buffer(page_rows=2)
    put(subject, 0, 1, 2).ends[0] = True
    batch = subject.take(10)
    assert batch.ends is not None
    assert batch.ends.dtype == np.bool_
    assert batch.ends.tolist() == [False, False, True]


def test_oldest_when_rows_leave_then_of_those_that_wait() -> None:
    subject = buffer(page_rows=2)
    assert subject.oldest_s == math.inf
    put(subject, 5, 6, 7)
    assert subject.oldest_s == 5.0
    take_numbers(subject, 2)
    assert subject.oldest_s == 7.0
    take_numbers(subject)
    assert subject.oldest_s == math.inf


def test_page_when_memory_is_used_up_then_none_until_a_batch_is_given_back() -> None:
    subject = buffer(page_rows=2, num_rows=4)
    put(subject, *range(4))
    assert subject.find_page(1) is None
    batch = subject.take(2)
    assert subject.find_page(1) is None
    subject.give_back(batch)
    put(subject, 4, 5)
    assert subject.find_page(1) is None
    assert all_taken(subject) == [[2, 3, 4, 5]]
    assert subject.nbytes == 0


def test_page_when_rows_of_several_are_under_way_then_their_memory_is_kept() -> None:
    subject = buffer(page_rows=2, num_rows=6)
    put(subject, *range(4))
    batch = subject.take(4)
    put(subject, 4, 5)
    assert subject.find_page(1) is None
    assert numbers_of(batch) == [0, 1, 2, 3]
    subject.give_back(batch)
    put(subject, 6, 7, 8, 9)
    assert all_taken(subject) == [[4, 5, 6, 7, 8, 9]]


@pytest.mark.parametrize("num_rows", [2, 3, 5, 100])
def test_nbytes_when_filled_then_stays_within_max_bytes(num_rows: int) -> None:
    max_bytes = num_rows * ROW_BYTES
    subject = RowBuffer(SPEC, page_rows=64, max_bytes=max_bytes)
    number = 0
    while subject.find_page(1) is not None:
        put(subject, number)
        number += 1
    assert number == subject.max_rows
    assert num_rows - subject.page_rows < number <= num_rows
    assert subject.nbytes <= max_bytes


def test_buffer_when_two_rows_do_not_fit_then_refused() -> None:
    with pytest.raises(InvalidRequestError) as raised:
        RowBuffer(SPEC, page_rows=64, max_bytes=2 * ROW_BYTES - 1)
    assert raised.value.argument == "max_bytes"


def test_values_when_they_are_large_then_bounded_but_one_row_always_fits() -> None:
    spec = capture(TensorDict({"x": torch.tensor(0), "v": "text"})).spec
    subject = RowBuffer(spec, page_rows=2, max_bytes=100_000)
    for number in range(3):
        page = subject.find_page(1, 1_000_000)
        assert page is not None
        page.put([torch.tensor(number)], NO_PRIORITY, 0.0, ["long"], 1_000_000)
        assert subject.find_page(1, 1) is None
        batch = subject.take(10)
        assert subject.find_page(1, 1) is None
        assert [captured.values[("v",)] for captured in batch.captured] == [["long"]]
        subject.give_back(batch)
    assert subject.nbytes < 100_000


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(tensordicts(), st.integers(1, 4))
def test_take_when_rows_are_anything_then_stacked(td: Any, num_rows: int) -> None:
    captured = capture(td)
    reader = RowReader(captured.spec, store="s")
    subject = RowBuffer(captured.spec, page_rows=2, max_bytes=1 << 20)
    for _ in range(num_rows):
        leaves, values = reader.read(td)
        page = subject.find_page(1, 1 if values else 0)
        assert page is not None
        page.put(leaves, NO_PRIORITY, 0.0, list(values), 1)
    for found in subject.take(num_rows).captured:
        num_found = found.spec.batch_size[0]
        built = capture(build(found.spec, found.tensors, found.values))
        check_matches(captured.spec.prepend((num_found,)), built.spec, store="s")
        for path, tensor in captured.tensors.items():
            bits = [row.tobytes() for row in _bits(built.tensors[path])]
            assert bits == [_bits(tensor[None])[0].tobytes()] * num_found
        for number, (path, _) in enumerate(captured.spec.values):
            assert same_value(list(built.values[path]), [values[number]] * num_found)


def _bits(tensor: torch.Tensor) -> Any:
    flat = tensor.contiguous().reshape(tensor.shape[0], -1)
    return (flat.view(torch.uint8) if flat.numel() else flat.to(torch.uint8)).numpy()


class History:
    """What a buffer must do, with lists."""

    def __init__(self) -> None:
        self.subject = buffer(page_rows=3, num_rows=12)
        self.rows: list[tuple[int, int, bool]] = []
        self.under_way: tuple[Batch, list[int]] | None = None
        self.number = 0

    def put(self, stream: int, *, has_priority: bool) -> None:
        if self.subject.find_page(stream) is None:
            assert self.subject.num_waiting + self.subject.num_under_way > 0
            return
        put(self.subject, self.number, stream=stream, priority=1.0 if has_priority else NO_PRIORITY)
        self.rows.append((self.number, stream, has_priority))
        self.number += 1

    def take(self, max_rows: int) -> None:
        if self.rows and self.under_way is None:
            _, *kind = self.rows[0]
            alike = 0
            while alike < min(max_rows, len(self.rows)) and [*self.rows[alike][1:]] == kind:
                alike += 1
            batch = self.subject.take(max_rows)
            self.under_way = batch, [number for number, *_ in self.rows[:alike]]
            del self.rows[:alike]

    def give_back(self) -> None:
        if self.under_way is not None:
            batch, numbers = self.under_way
            assert numbers_of(batch) == numbers
            self.subject.give_back(batch)
            self.under_way = None


@pytest.mark.parametrize("seed", range(20))
def test_buffer_when_used_at_random_then_as_a_list(seed: int) -> None:
    rng = np.random.default_rng(seed)
    history = History()
    stream = 1
    for _ in range(400):
        action = rng.integers(10)
        if action < 6:
            stream += int(rng.random() < 0.1)
            history.put(stream, has_priority=bool(rng.random() < 0.9))
        elif action < 8:
            history.take(int(rng.integers(1, 8)))
        else:
            history.give_back()
        assert history.subject.num_waiting == len(history.rows)
        assert history.subject.nbytes <= 12 * ROW_BYTES
    history.give_back()
    while history.rows:
        history.take(5)
        history.give_back()
    assert history.subject.nbytes == 0 or history.subject.nbytes == 3 * ROW_BYTES


def test_take_when_policy_versions_are_given_then_each_row_has_its_own_and_those_without_go_apart() -> None:
    subject = buffer(page_rows=4)
    for number, version in enumerate([NO_VERSION, 3, 3, 5, 0, NO_VERSION]):
        page = subject.find_page(1)
        assert page is not None
        page.put([torch.tensor(number)], NO_PRIORITY, 0.0, policy_version=version)
    found = []
    while subject.num_waiting:
        batch = subject.take(10)
        versions = None if batch.policy_versions is None else batch.policy_versions.tolist()
        found.append((numbers_of(batch), versions))
        subject.give_back(batch)
    assert found == [([0], None), ([1, 2, 3, 4], [3, 3, 5, 0]), ([5], None)]
