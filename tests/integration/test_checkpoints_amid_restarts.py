"""Checkpoints of a server that is killed, and started again, while what it has kept for them is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import tdserve
from tdserve.base.errors import TransferAbortedError
from tdserve.client.moves.checkpoint_writer import CheckpointProgress
from tests.integration.crashing import Crashing
from tests.integration.test_checkpoints import check_filled, fill

pytestmark = pytest.mark.integration


def restart_when_kept(crashing: Crashing, num_times: int) -> Callable[[CheckpointProgress], None]:
    """Returns a function that restarts a server so often, each time when a client begins to read what it has kept."""
    left = list(range(num_times))

    def restart(progress: CheckpointProgress) -> None:
        if left and any(crashing.root.glob("checkpoints/*/*")):
            left.pop()
            crashing.restart()

    return restart


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_checkpoint_when_the_server_is_restarted_while_the_moment_is_read_then_it_is_of_a_later_moment(
    tmp_path: Path, transport: str
) -> None:
    with (
        Crashing(tmp_path / "root") as crashing,
        crashing.server.client(transport=transport, timeout_s=60.0) as client,
    ):
        fill(client)
        for name in ("first", "second", "third"):  # values are kept apart, and read one store after the other
            client.create_kv(name).put("a", {"name": name})
        made = client.checkpoint(tmp_path / "place", on_progress=restart_when_kept(crashing, 1), timeout_s=120.0)
        assert [each.id for each in tdserve.list_checkpoints(tmp_path / "place")] == [made.id]
        assert client.restore(tmp_path / "place", prefix="old-") == sorted(f"old-{each.name}" for each in made.stores)
        check_filled(client, "old-")
        assert [client.kv(f"old-{name}")["a"]["name"] for name in ("first", "third")] == ["first", "third"]


@pytest.mark.slow
def test_checkpoint_when_the_server_is_restarted_each_time_then_a_retryable_error_and_the_next_is_made(
    tmp_path: Path,
) -> None:
    with Crashing(tmp_path / "root") as crashing, crashing.server.client(timeout_s=60.0) as client:
        for name in ("first", "second", "third"):
            client.create_kv(name).put("a", {"name": name})
        with pytest.raises(TransferAbortedError, match="was restarted") as refused:
            client.checkpoint(tmp_path / "place", on_progress=restart_when_kept(crashing, 2), timeout_s=120.0)
        assert refused.value.retryable
        assert tdserve.list_checkpoints(tmp_path / "place") == []
        assert len(client.checkpoint(tmp_path / "place").stores) == 3


@pytest.mark.slow
def test_restore_when_the_server_is_restarted_amid_it_then_it_goes_on(tmp_path: Path) -> None:
    with Crashing(tmp_path / "root") as crashing, crashing.server.client(timeout_s=60.0) as client:
        fill(client)
        made = client.checkpoint(tmp_path / "place")
        left = [1, 2]

        def restart(_: object) -> None:
            if left and any(crashing.root.glob("arriving/*/*")):
                left.pop()
                crashing.restart()

        assert client.restore(tmp_path / "place", prefix="old-", on_progress=restart) == sorted(
            f"old-{each.name}" for each in made.stores
        )
        assert not left
        check_filled(client, "old-")
