"""A restore that fails or is interrupted: what it has brought goes, and what others have made meanwhile stays."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.base.errors import CorruptDataError, DeadlineExceededError, StoreNotFoundError
from tdserve.client.moves.checkpoint_restore import RestoreProgress
from tdserve.client.session.store_changes import delete_store
from tests.processes import children_of

pytestmark = pytest.mark.integration

NUM_ROWS = 400_000
"""Of eight bytes: several blocks."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tdserve.Server]:
    """A server of its own."""
    with tdserve.Server(tmp_path / "root").start() as made:
        yield made


def find_syncer(server: tdserve.Server) -> int:
    """Returns the id of the server's process that syncs."""
    command_of = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children_of(server.pid)}
    (found,) = [pid for pid, command in command_of.items() if b"sync_process" in command]
    return found


@pytest.mark.slow
def test_restore_when_it_fails_after_another_client_has_made_a_store_of_a_name_then_that_stays(
    server: tdserve.Server, tmp_path: Path
) -> None:
    with server.client() as client, server.client() as other:
        client.memmap(TensorDict({"x": torch.arange(4)}, [4]), "a-small-one")
        client.memmap(TensorDict({"x": torch.arange(NUM_ROWS)}, [NUM_ROWS]), "big")
        (big,) = [each for each in client.checkpoint(tmp_path / "place").stores if each.name == "big"]
        client.delete("a-small-one")
        client.delete("big")
        digests = next([*file.digests] for file in big.files if len(file.digests) > 1)
        path = tmp_path / "place/blocks" / digests[-1][:2] / digests[-1]
        path.write_bytes(path.read_bytes()[:-1])  # others come before it
        made = list[str]()

        def replace(progress: RestoreProgress) -> None:
            if "a-small-one" in other.stores() and not made:
                other.delete("a-small-one")
                other.memmap(TensorDict({"mine": torch.ones(3)}, [3]), "a-small-one")
                made.append(progress.store)

        with pytest.raises(CorruptDataError):
            client.restore(tmp_path / "place", on_progress=replace)
        assert made
        assert other.stores() == ["a-small-one"]
        assert other["a-small-one"]["mine"].sum() == 3


@pytest.mark.slow
def test_restore_when_its_time_is_over_while_a_store_is_shown_then_the_store_goes(
    server: tdserve.Server, tmp_path: Path
) -> None:
    row = TensorDict({"x": torch.zeros(8)}, [])
    with server.client() as client:
        client.create_replay("table", like=row, capacity=100, durability="disk").extend(row.expand(5).contiguous())
        client.checkpoint(tmp_path / "place")
        client.delete("table")
        pid = find_syncer(server)
        os.kill(pid, signal.SIGSTOP)  # stands for a slow disk
        try:
            with pytest.raises(DeadlineExceededError):
                client.restore(tmp_path / "place", timeout_s=3)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert client.stores() == []
        assert client.restore(tmp_path / "place") == ["table"]
        assert len(client.replay("table")) == 5


def test_deletion_when_the_name_has_another_incarnation_then_nothing_is_deleted(server: tdserve.Server) -> None:
    with server.client() as client:
        client.create_kv("never used")
        client.memmap(TensorDict({"x": torch.arange(4)}, [4]), "used")
        for name in ("never used", "used"):
            uid = client.describe(name).uid
            with pytest.raises(StoreNotFoundError):
                delete_store(client, name, uid=f"{0:032x}")
            assert client.describe(name).uid == uid
            delete_store(client, name, uid=uid)
        assert client.stores() == []
