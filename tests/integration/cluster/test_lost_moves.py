"""Moves and creations whose servers are away, stand still, or are lost in the middle: they end soon, and nothing has
changed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from tdserve.base.errors import ConnectError, DeadlineExceededError, StoreNotFoundError
from tdserve.client.cluster.moves.store_move import MoveProgress
from tests.integration.cluster.losing import connecting, join_addresses, rows
from tests.integration.cluster.moving import choose_other
from tests.integration.cluster.names import name_owned_by
from tests.integration.crashing import Crashing
from tests.processes import wait_for

pytestmark = pytest.mark.integration

SOON_S = 15.0
"""Far less than the timeouts of moves and of these clients; far more than a server that is away takes to be noticed."""


@pytest.fixture
def address(crashing: list[Crashing]) -> str:
    """The address of servers that can be killed."""
    return join_addresses(crashing)


@contextmanager
def raising_soon(match: str) -> Iterator[None]:
    """Expects that a block raises ConnectError within a few seconds."""
    begun_s = time.monotonic()
    with pytest.raises(ConnectError, match=match):
        yield
    assert time.monotonic() - begun_s < SOON_S


@contextmanager
def killed(crashing: list[Crashing], *numbers: int) -> Iterator[None]:
    """Runs a block while servers are away."""
    for number in numbers:
        crashing[number].kill()
    try:
        yield
    finally:
        for number in numbers:
            crashing[number].start()


@pytest.mark.slow
def test_move_when_its_target_or_source_is_away_then_refused_soon(crashing: list[Crashing]) -> None:
    name = name_owned_by(0, 3)
    with connecting(crashing, timeout_s=60.0) as client:
        table = client.create_replay(name, rows(1)[0], 100)
        table.extend(rows(5))
        with killed(crashing, 1):
            with raising_soon(f"server 1, to which '{name}' moves"):
                client.rebalance(name, 1)
            assert client.find_server(name) == 0
            assert len(table) == 5
        with killed(crashing, 0), raising_soon(f"server 0, from which '{name}' moves"):
            client.rebalance(name, 1)
        assert len(table) == 5
        client.delete(name)


@pytest.mark.slow
def test_move_when_the_server_that_may_have_it_is_away_then_the_error_names_it(crashing: list[Crashing]) -> None:
    name = name_owned_by(0, 3)
    with connecting(crashing, timeout_s=60.0) as client:
        with killed(crashing, 2), raising_soon(f"server 2, which may have '{name}'"):
            client.rebalance(name, 1)
        wait_for(lambda: not client.stats().get("lost"), "an answer of the server")
        with pytest.raises(StoreNotFoundError):
            client.rebalance(name, 1)


@pytest.mark.slow
def test_creation_when_the_owner_stands_still_then_refused_soon_and_nothing_is_created_later(
    crashing: list[Crashing],
) -> None:
    name = name_owned_by(1, 3)
    with connecting(crashing, timeout_s=4.0) as client:
        client.create_replay(name, rows(1)[0], 10)  # so that it is connected
        client.delete(name)
        os.kill(crashing[1].server.pid, signal.SIGSTOP)
        try:
            with raising_soon(f"server 1, which decides about the name '{name}'"):
                client.create_replay(name, rows(1)[0], 10)
        finally:
            os.kill(crashing[1].server.pid, signal.SIGCONT)
        wait_for(lambda: not client.stats().get("lost"), "an answer of the server")
        client.create_replay(name, rows(1)[0], 10)  # if the first request had been sent, the store would exist
        client.delete(name)


@pytest.mark.slow
def test_move_when_its_target_is_lost_in_the_middle_then_the_store_stays(crashing: list[Crashing]) -> None:
    name = name_owned_by(0, 3)
    content = TensorDict({"x": torch.arange(4 << 20)}, [4 << 20])
    with connecting(crashing, timeout_s=60.0) as client:
        store = client.memmap(content, name)
        target = choose_other(client, name)
        lost: list[int] = []

        def kill_target(_: object) -> None:
            if not lost:
                lost.append(target)
                crashing[target].kill()

        try:
            with raising_soon(f"server {target}, to which '{name}' moves"):
                client.rebalance(name, target, on_progress=kill_target)
            assert client.find_server(name) == 0
            store.set_at_("x", torch.tensor(7), 0)
            assert store.get_at("x", 0) == 7
        finally:
            crashing[target].start()
        assert client.rebalance(name, target) == target
        assert store.get_at("x", 0) == 7
        client.delete(name)


@pytest.mark.slow
@pytest.mark.parametrize("is_sealed", [False, True], ids=["served", "sealed"])
def test_move_when_its_target_is_restarted_behind_a_pass_then_all_content_comes(
    crashing: list[Crashing], is_sealed: bool
) -> None:
    name, num_rows = name_owned_by(0, 3), 1 << 20
    with connecting(crashing, timeout_s=60.0) as client:
        client.memmap(TensorDict({"x": torch.arange(num_rows), "y": torch.ones(num_rows)}, [num_rows]), name)
        target = choose_other(client, name)
        restarted: list[int] = []

        def restart_target(progress: MoveProgress) -> None:
            if not restarted and progress.nbytes == progress.total_nbytes and progress.is_sealed == is_sealed:
                restarted.append(target)
                crashing[target].kill()
                crashing[target].start()

        assert client.rebalance(name, target, on_progress=restart_target) == target
        assert restarted
        found = client.from_remote_init(name)
        assert torch.equal(found["x"], torch.arange(num_rows))
        assert found["y"].eq(1.0).all()
        client.delete(name)


@pytest.mark.slow
def test_drain_when_a_server_is_away_then_none_of_its_stores_goes_there(crashing: list[Crashing]) -> None:
    names = sorted(name_owned_by(0, 3) for _ in range(4))
    with connecting(crashing, timeout_s=60.0) as client:
        for name in names:
            client.create_replay(name, rows(1)[0], 100).extend(rows(3))
        with killed(crashing, 1):
            assert sorted(client.drain(0)) == names
            assert {client.find_server(name) for name in names} == {2}
        with killed(crashing, 0, 1), raising_soon(f"still on server 2: {', '.join(map(repr, names))}"):
            client.drain(2)
        assert {client.find_server(name) for name in names} == {2}
        for name in names:
            client.delete(name)


@pytest.mark.slow
def test_move_when_it_fails_then_nothing_of_it_stays_at_the_target(crashing: list[Crashing]) -> None:
    name = name_owned_by(0, 3)
    arriving = Path(crashing[1].root, "arriving")

    def refuse(progress: Any) -> None:
        assert list(arriving.iterdir())
        raise RuntimeError("of the caller")

    def refuse_sealed(progress: Any) -> None:
        if progress.is_sealed:
            raise RuntimeError("of the caller")

    with connecting(crashing) as client:
        store = client.memmap(TensorDict({"x": torch.arange(1 << 20)}, [1 << 20]), name)
        for on_progress in (refuse, refuse_sealed):
            with pytest.raises(RuntimeError, match="of the caller"):
                client.rebalance(name, 1, on_progress=on_progress)
            assert list(arriving.iterdir()) == []
        with pytest.raises(DeadlineExceededError):
            client.rebalance(name, 1, timeout_s=0.0)
        assert list(arriving.iterdir()) == []
        store.set_at_("x", torch.zeros(1, dtype=torch.int64), slice(5, 6))
        assert client.rebalance(name, 1) == 1
        assert store["x"][5] == 0
        client.delete(name)


@pytest.mark.slow
def test_restore_when_it_fails_then_nothing_of_it_stays(crashing: list[Crashing], tmp_path: Path) -> None:
    name = name_owned_by(0, 3)

    def refuse(progress: Any) -> None:
        raise RuntimeError("of the caller")

    with connecting(crashing) as client:
        client.memmap(TensorDict({"x": torch.arange(1 << 20)}, [1 << 20]), name)
        client.checkpoint(tmp_path / "place")
        with pytest.raises(RuntimeError, match="of the caller"):
            client.restore(tmp_path / "place", names=[name], prefix="again-", on_progress=refuse)
        assert not any(list(Path(each.root, "arriving").iterdir()) for each in crashing)
        assert f"again-{name}" not in client
        client.delete(name)
