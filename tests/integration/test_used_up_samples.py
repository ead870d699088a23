"""Rows that leave their table with a sample do not come again after a kill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tests.integration.crashing import Crashing

pytestmark = pytest.mark.integration

NUM_ROWS = 600
BATCH = 40
NUM_KILLS = 5


def create_full(client: tdserve.Client) -> tdserve.ReplayHandle:
    """Returns a full table whose rows leave it with their first sample."""
    number = torch.arange(NUM_ROWS)
    rows = TensorDict({"number": number, "body": number[:, None].expand(-1, 1_000).float()}, [NUM_ROWS])
    table = client.create_replay("table", rows[0], NUM_ROWS, max_times_sampled=1)
    table.extend(rows)
    return table


@pytest.mark.slow
@pytest.mark.once("gloo")  # the others have waited for the server's end all along
@pytest.mark.parametrize("transport", ["gloo", "grpc", "shm"])
@pytest.mark.parametrize("is_announced", [False, True])
def test_sample_when_the_server_is_killed_after_it_then_its_rows_have_left(
    tmp_path: Path, transport: Any, is_announced: bool
) -> None:
    """The server is killed as soon as a sample has returned. A call with a timeout of 0 gets an announcement of its
    content first; a call with a longer one waits for the content at once."""
    with Crashing(tmp_path / "root") as crashing, crashing.server.client(transport=transport, timeout_s=60.0) as client:
        table = create_full(client)
        had: list[int] = []
        for _ in range(NUM_KILLS):
            sample = table.sample(BATCH, timeout_s=0.0 if is_announced else 60.0)
            had += sample["number"].tolist()
            crashing.restart()
            assert len(table) == NUM_ROWS - len(had)
        while len(table):
            had += table.sample(BATCH)["number"].tolist()
    assert sorted(had) == list(range(NUM_ROWS))


@pytest.mark.slow
def test_batches_when_the_server_is_killed_meanwhile_then_no_row_comes_twice(tmp_path: Path) -> None:
    with Crashing(tmp_path / "root") as crashing, crashing.server.client(transport="gloo", timeout_s=60.0) as client:
        table = create_full(client)
        had: list[int] = []
        with table.batches(BATCH, prefetch=2) as batches:
            for turn in range(NUM_ROWS // BATCH // 2):
                had += next(batches)["number"].tolist()
                if turn % 2:
                    crashing.restart()
        assert len(set(had)) == len(had)
        assert len(table) <= NUM_ROWS - len(had)
