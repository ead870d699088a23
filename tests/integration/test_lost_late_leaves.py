"""Local clients that are killed while they write leaves that the rows of a table have lacked so far."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tdserve
from tdserve.client.tables.replay import ReplayHandle
from tests.integration.crashing import Crashing
from tests.integration.forked_clients import ForkedClients
from tests.integration.local_roles import NUM_ROWS, row, rows
from tests.processes import wait_for

pytestmark = pytest.mark.integration


def count_rows(table: ReplayHandle) -> tuple[int, int]:
    """Returns the number of readable rows, and of rows that lack leaves."""
    info = table.info()
    return info["num_rows"], info["num_incomplete"]


@pytest.mark.slow
@pytest.mark.parametrize("is_restarted", [False, True])
@pytest.mark.parametrize("at", [0, 1], ids=["before", "behind"])
def test_rows_when_the_writer_of_a_leaf_they_lack_is_killed_then_stay_and_lack_it(
    forked_clients: ForkedClients, tmp_path: Path, at: int, *, is_restarted: bool
) -> None:
    with Crashing(tmp_path) as crashing, crashing.server.client(transport="shm", timeout_s=60.0) as client:
        table = client.create_replay("late", row(), 4 * NUM_ROWS)
        index = table.extend(rows(5).exclude("first"))
        with forked_clients.start("write", crashing.server.address, "overwrite_key", "late", 7, at=at) as writer:
            assert writer.line() == "connected shm"
            writer.wait_killed()
        if is_restarted:
            crashing.restart()
        wait_for(lambda: count_rows(table) == (NUM_ROWS, NUM_ROWS), "the end of the write that was lost")
        assert torch.equal(table[index]["body"], rows(5)["body"])
        assert table.sample(4, require=("body", "last"))["last"].tolist() == [5] * 4
        with pytest.raises(tdserve.DeadlineExceededError, match="'first' is missing in 8"):
            table.sample(4, timeout_s=0)
        table.set_at_("first", rows(5)["first"], index)
        assert table.sample(4)["first"].tolist() == [5] * 4


def test_rows_when_some_had_the_leaf_that_was_being_written_then_these_alone_are_gone(
    forked_clients: ForkedClients, server: tdserve.Server, client: tdserve.Client, name: str
) -> None:
    table = client.create_replay(name, row(), 4 * NUM_ROWS)
    index = table.extend(rows(5).exclude("first"))
    table.set_at_("first", rows(5)["first"][:3], index[:3])
    with forked_clients.start("write", server.address, "overwrite_key", name, 7, at=1) as writer:
        assert writer.line() == "connected shm"
        writer.wait_killed()
    wait_for(lambda: count_rows(table) == (NUM_ROWS - 3, NUM_ROWS - 3), "the end of the write that was lost")
    assert torch.equal(table[index[3:]]["body"], rows(5)["body"][3:])
