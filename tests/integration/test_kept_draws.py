"""Draws for ranks, after their rows got new generations or were lost: restarts, copies, losses of power."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.server.durability.power_loss import recover
from tdserve.store.roots.root import Root
from tests.integration.power import compose

pytestmark = pytest.mark.integration

NUM_ROWS = 40
PER_RANK = 5


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tdserve.Server]:
    with tdserve.Server(tmp_path / "root", sync_interval_s=0) as started:
        yield started


def create(client: tdserve.Client, **options: Any) -> tdserve.ReplayHandle:
    """Returns a full table of rows with their numbers."""
    table = client.create_replay("rows", TensorDict({"x": torch.tensor(0)}), NUM_ROWS, **options)
    table.extend(TensorDict({"x": torch.arange(NUM_ROWS)}, [NUM_ROWS]))
    return table


def draw(table: tdserve.ReplayHandle, step: int, rank: int) -> list[int]:
    """Returns the share of a rank."""
    found: list[int] = table.sample(PER_RANK, rank=rank, world_size=2, step=step)["x"].tolist()
    return found


def draw_all(table: tdserve.ReplayHandle) -> dict[tuple[int, int], list[int]]:
    """Returns the shares of both ranks in two steps."""
    return {(step, rank): draw(table, step, rank) for step in (0, 1) for rank in (0, 1)}


def check_same_draws(table: tdserve.ReplayHandle, shares: dict[tuple[int, int], list[int]]) -> None:
    """Fails unless ranks get their rows again, and nobody else does."""
    had = {row for share in shares.values() for row in share}
    assert len(table) == NUM_ROWS - len(had)
    assert draw_all(table) == shares
    assert not had & {*draw(table, 2, 0), *draw(table, 2, 1)}
    left = table.sample(len(table))["x"].tolist()
    assert not had & {*left}


def test_restore_when_ranks_have_used_rows_up_then_they_do_not_come_back(
    server: tdserve.Server, tmp_path: Path
) -> None:
    with server.client() as client:
        shares = draw_all(create(client, max_times_sampled=1))
        client.checkpoint(tmp_path / "place")
        client.restore(tmp_path / "place", prefix="copy-")
        check_same_draws(client.replay("copy-rows"), shares)
        check_same_draws(client.replay("rows"), shares)


def test_sample_when_a_row_of_another_rank_was_deleted_then_a_restart_ends_that_share_alone(
    server: tdserve.Server,
) -> None:
    with server.client() as client:
        table = create(client, sampler=tdserve.WithoutReplacement())  # no row is in two shares
        shares = draw_all(table)
        table.delete(table.sample(PER_RANK, rank=0, world_size=2, step=0)["index"][:1])
    server.shutdown()
    server.start()
    with server.client() as client:
        table = client.replay("rows")
        with pytest.raises(tdserve.WrongStateError, match="1 of its 5 rows"):
            draw(table, 0, 0)
        assert {key: draw(table, *key) for key in shares if key != (0, 0)} == {
            key: share for key, share in shares.items() if key != (0, 0)
        }


@pytest.mark.parametrize("num_cut_off", [0, 1])
def test_server_when_the_power_was_lost_then_rows_that_ranks_have_used_up_do_not_come_back(
    server: tdserve.Server, tmp_path: Path, num_cut_off: int
) -> None:
    with server.client() as client:
        shares = draw_all(create(client, max_times_sampled=1))
    server.shutdown()  # an orderly end syncs everything
    compose(tmp_path / "root", tmp_path / "root", tmp_path / "other", lambda *_: True)
    for _ in range(num_cut_off):  # a recovery that was cut off at its end
        root = Root.acquire(tmp_path / "other")
        recover(root)
        root.release()
    with tdserve.Server(tmp_path / "other") as other, other.client() as client:
        check_same_draws(client.replay("rows"), shares)
