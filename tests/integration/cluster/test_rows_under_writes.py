"""Rows of shared tables that others write while they are drawn: that makes no server count as lost."""

from __future__ import annotations

import logging
from threading import Event, Thread

import pytest
import torch
from tensordict import TensorDict

import tdserve

pytestmark = pytest.mark.integration

NUM_ROWS, WIDTH = 300, 2_000
ROW = TensorDict({"number": torch.tensor(0), "body": torch.zeros(WIDTH), "score": torch.tensor(0.0)}, [])


def make_rows() -> TensorDict:
    """Returns rows without scores yet."""
    return TensorDict({"number": torch.arange(NUM_ROWS), "body": torch.ones(NUM_ROWS, WIDTH)}, [NUM_ROWS])


@pytest.mark.slow
def test_take_when_other_leaves_of_its_rows_are_written_then_each_row_comes_once_and_no_server_is_left_out(
    client: tdserve.ClusterClient, address: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    table = client.create_replay(name, ROW, 3 * NUM_ROWS, shards=3, shard_by="number")
    table.extend(make_rows())
    is_over, num_written = Event(), 0

    def write() -> None:
        nonlocal num_written
        with tdserve.connect(address) as other:
            scored = other.replay(name)
            while not is_over.is_set():
                rows = scored.sample(128, require=["body"])
                scored.set_at_("score", torch.rand(128), rows)
                num_written += 1

    writer = Thread(target=write)
    writer.start()
    try:
        with caplog.at_level(logging.WARNING, logger="tdserve"):
            had: list[int] = []
            while len(had) < NUM_ROWS:
                with table.take(6, consumer="judge", require=["body"]) as taken:
                    had += taken["number"].tolist()
                assert not table.is_degraded
    finally:
        is_over.set()
        writer.join()
    assert sorted(had) == list(range(NUM_ROWS))
    assert num_written
    assert [line for line in caplog.messages if "does not answer" in line or "continues without" in line] == []
