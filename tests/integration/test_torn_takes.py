"""Rows that are taken while other leaves of them are written: rows that nobody has got do not count as sampled."""

from __future__ import annotations

from threading import Event, Thread

import pytest
import torch
from tensordict import TensorDict

import tdserve

pytestmark = pytest.mark.integration

NUM_ROWS, WIDTH = 256, 2_000


@pytest.mark.slow
def test_take_when_other_leaves_of_its_rows_are_written_then_each_row_counts_once(
    client: tdserve.Client, server: tdserve.Server, name: str
) -> None:
    row = TensorDict({"number": torch.tensor(0), "body": torch.zeros(WIDTH), "score": torch.tensor(0.0)}, [])
    table = client.create_replay(name, row, NUM_ROWS)
    index = table.extend(row.expand(NUM_ROWS).clone().set("number", torch.arange(NUM_ROWS)))
    is_over = Event()

    def write() -> None:
        with server.client() as other:
            scored = other.replay(name)
            while not is_over.is_set():
                scored.set_at_("score", torch.rand(NUM_ROWS), index)

    writer = Thread(target=write)
    writer.start()
    try:
        had: list[int] = []
        while len(had) < NUM_ROWS:
            with table.take(8, consumer="judge") as taken:
                had += taken["number"].tolist()
    finally:
        is_over.set()
        writer.join()
    assert sorted(had) == list(range(NUM_ROWS))
    assert table.info()["samples"] == NUM_ROWS
