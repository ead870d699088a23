"""Several clients write leaves of the same rows at once: samples that hold these rows stay valid."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tdserve

pytestmark = pytest.mark.integration

NUM_ROWS = 32
WIDTH = 4_096
"""Large enough for a write of one leaf of all rows to take a while."""

LIKE = TensorDict({"number": torch.tensor(0), "score": torch.tensor(0.0), "logp": torch.zeros(WIDTH)}, [])


def rows(num_rows: int = NUM_ROWS) -> TensorDict:
    """Rows with their numbers."""
    td: TensorDict = LIKE.expand(num_rows).clone()
    td["number"] = torch.arange(num_rows)
    return td


@contextmanager
def writing(act: Callable[[], Any]) -> Iterator[None]:
    """Runs a block while another thread repeats this."""
    is_over, failures = Event(), []

    def work() -> None:
        try:
            while not is_over.is_set():
                act()
        except Exception as error:  # noqa: BLE001 (the test fails with it)
            failures.append(error)

    thread = Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(60.0)
    assert not failures


@pytest.fixture
def other(client: tdserve.Client, server: tdserve.Server) -> Iterator[tdserve.Client]:
    """Another client, of the same transport."""
    with server.client(transport=client.transport) as made:
        yield made


@pytest.mark.slow
def test_batch_when_another_leaf_is_written_meanwhile_then_stands_for_its_rows_all_the_same(
    client: tdserve.Client, other: tdserve.Client, name: str
) -> None:
    table = client.create_replay(name, LIKE, NUM_ROWS, sampler=tdserve.Prioritized())
    index = table.extend(rows())
    batch = table.sample(NUM_ROWS)
    values = torch.ones(NUM_ROWS, WIDTH)
    beside = other.replay(name)
    with writing(lambda: beside.set_at_("logp", values, index)):
        for number in range(60):
            assert len(table) == NUM_ROWS
            assert table.update_priority(batch, float(number)) == 0
            table.set_at_("score", torch.full((NUM_ROWS,), float(number)), batch)
    assert (table[index]["score"][batch["index"]] == 59.0).all()


@pytest.mark.slow
@pytest.mark.parametrize("raises", [False, True])
def test_take_when_a_leaf_of_its_rows_is_written_meanwhile_then_all_are_acknowledged_or_given_back(
    client: tdserve.Client, other: tdserve.Client, name: str, raises: bool
) -> None:
    table = client.create_replay(name, LIKE, NUM_ROWS)
    index = table.extend(rows())
    values = torch.ones(NUM_ROWS, WIDTH)
    beside = other.replay(name)
    seen: list[int] = []
    with writing(lambda: beside.set_at_("logp", values, index)):
        for _ in range(NUM_ROWS // 2):
            try:
                with table.take(2, consumer="trainer") as taken:
                    seen += taken["number"].tolist()
                    if raises:
                        raise ZeroDivisionError
            except ZeroDivisionError:
                pass
    assert table.info()["num_leased"] == 0
    if raises:
        seen = table.take(NUM_ROWS, consumer="trainer", ack=False)["number"].tolist()
    assert sorted(seen) == list(range(NUM_ROWS))


@pytest.mark.slow
def test_delete_and_clear_when_the_rows_are_being_written_then_they_are_gone_and_the_next_ones_are_whole(
    client: tdserve.Client, other: tdserve.Client, name: str
) -> None:
    table = client.create_replay(name, LIKE, NUM_ROWS)
    values = torch.ones(NUM_ROWS // 2, WIDTH)
    beside = other.replay(name)

    def write() -> None:
        with suppress(tdserve.SelectionError):  # of rows that are gone
            beside.set_at_("logp", values, torch.arange(NUM_ROWS // 2))

    with writing(write):
        for number in range(60):
            index = table.extend(rows(NUM_ROWS - 8))
            if number % 3:
                assert table.delete(index[:4]) == 4
                left = table[index[4:]]
                assert left["number"].tolist() == list(range(4, NUM_ROWS - 8))
                assert (left["logp"] == left["logp"][:, :1]).all()
            assert table.clear() == len(index) - (4 if number % 3 else 0)
            assert len(table) == 0
    assert len(table.extend(rows())) == NUM_ROWS
    assert sorted(table[:]["number"].tolist()) == list(range(NUM_ROWS))
