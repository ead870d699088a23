"""Many writers and samplers at once: no row is torn, lost or duplicated, each row is drawn as often as it should be,
and a limiter's bounds hold at every moment. ``pytest -m full`` runs all 16 x 1,000 extends."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

import tdserve
from tests import chi_square
from tests.integration.checked_rows import MAX_NUMBERS, checked_ids, checked_rows, example
from tests.integration.conftest import FreshServer
from tests.integration.fleet import Fleet
from tests.processes import wait_for

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

NUM_WRITERS, NUM_SAMPLERS, NUM_ROWS, NUM_SAMPLED = 16, 4, 32, 256
NUM_EXTENDS = (24, pytest.param(1000, marks=pytest.mark.full))
"""Extends of each writer: in any run, and in a full one."""
INLINE_FLOATS, CHANNEL_FLOATS = 16, 260
"""Floats of a row: extends of 32 such rows are sent inline, or over the data transport."""


class Load:
    """16 writers and 4 samplers of one table, and what the samplers have read.

    Args:
        folder: Folder for the samplers' results.
    """

    def __init__(self, client: tdserve.Client, replay: Any, folder: Path, *, num_extends: int, num_floats: int) -> None:
        self.replay = replay
        self.num_each = num_extends * NUM_ROWS
        self.total = NUM_WRITERS * self.num_each
        self._paths = [folder / f"seen-{sampler}.npy" for sampler in range(NUM_SAMPLERS)]
        writing = {"name": replay.name, "num_extends": num_extends, "num_rows": NUM_ROWS, "num_floats": num_floats}
        sampling = {"name": replay.name, "num_rows": NUM_SAMPLED, "until": self.total}
        writers = [("extend", {**writing, "writer": writer}) for writer in range(NUM_WRITERS)]
        samplers = [("sample", {**sampling, "path": str(path)}) for path in self._paths]
        self.fleet = Fleet(client, *writers, *samplers)

    def wait_inserted(self, num_rows: int) -> None:
        """Waits until the table has this many inserts."""
        wait_for(lambda: self.replay.info()["inserts"] >= num_rows, f"the insert of {num_rows} rows", timeout_s=300.0)

    def finish(self) -> None:
        """Waits until all have finished."""

        def is_over(fleet: Fleet) -> bool:
            return all(fleet.said)

        self.fleet.wait(is_over, timeout_s=300.0)
        assert [self.fleet.numbers(writer, "stored") for writer in range(NUM_WRITERS)] == [
            [self.num_each]
        ] * NUM_WRITERS
        info = self.replay.info()
        assert info["inserts"] == self.total, "each acknowledged row once"
        assert info["reserved_rows"] == 0
        sampled = [self.fleet.numbers(NUM_WRITERS + sampler, "sampled") for sampler in range(NUM_SAMPLERS)]
        assert all(number[0] > 0 for number in sampled)

    def seen(self) -> NDArray[np.int64]:
        """Returns row number, generation and id of every sampled row. Fails if two samplers read different rows at a
        place."""
        seen = np.unique(np.concatenate([np.load(path) for path in self._paths]), axis=0)
        assert len(np.unique(seen[:, :2], axis=0)) == len(seen), "one place, two rows"
        assert len(np.unique(seen[:, 2])) == len(seen), "one row, two places"
        return seen


def content_of(replay: Any) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the numbers and ids of all live rows; fails if a row is torn."""
    num_rows = len(replay)
    places, ids = [], []
    for start in range(0, num_rows, 4096):
        place = torch.arange(start, min(start + 4096, num_rows))
        places.append(place.numpy())
        ids.append(checked_ids(replay[place]))
    return np.concatenate(places), np.concatenate(ids)


def all_ids(num_each: int) -> NDArray[np.int64]:
    """Returns the ids of all writers' rows, sorted."""
    return np.concatenate([writer * MAX_NUMBERS + np.arange(num_each) for writer in range(NUM_WRITERS)])


@pytest.mark.slow
@pytest.mark.parametrize("num_extends", NUM_EXTENDS)
def test_rows_when_sixteen_write_and_four_sample_then_none_is_torn_lost_or_duplicated(
    client: tdserve.Client, name: str, tmp_path: Path, num_extends: int
) -> None:
    total = NUM_WRITERS * num_extends * NUM_ROWS
    replay = client.create_replay(name, example(INLINE_FLOATS), total)
    load = Load(client, replay, tmp_path, num_extends=num_extends, num_floats=INLINE_FLOATS)
    with load.fleet:
        load.finish()
    places, ids = content_of(replay)
    assert np.array_equal(np.sort(ids), all_ids(load.num_each)), "lost, or there twice"
    seen = load.seen()
    assert np.array_equal(ids[np.searchsorted(places, seen[:, 0])], seen[:, 2]), (
        "samples show other rows than the table"
    )


@pytest.mark.slow
@pytest.mark.parametrize("num_extends", NUM_EXTENDS)
def test_rows_when_data_workers_are_killed_meanwhile_then_none_is_torn_lost_or_duplicated(
    fresh_server: FreshServer, tmp_path: Path, num_extends: int
) -> None:
    server = fresh_server(num_workers=2)
    total = NUM_WRITERS * num_extends * NUM_ROWS
    with server.client(transport="gloo", timeout_s=60.0) as client:
        wait_for(lambda: all(worker["is_ready"] for worker in client.stats()["workers"]), "the start of both workers")
        replay = client.create_replay("killed", example(CHANNEL_FLOATS), total)
        load = Load(client, replay, tmp_path, num_extends=num_extends, num_floats=CHANNEL_FLOATS)
        with load.fleet:
            for kill in range(2):
                load.wait_inserted((kill + 1) * total // 3)
                os.kill(client.stats()["workers"][kill]["pid"], signal.SIGKILL)
            load.finish()
        wait_for(lambda: [worker["num_restarts"] for worker in client.stats()["workers"]] == [1, 1], "two restarts")
        places, ids = content_of(replay)
        assert np.array_equal(np.sort(ids), all_ids(load.num_each)), "lost, or there twice"
        seen = load.seen()
        assert np.array_equal(ids[np.searchsorted(places, seen[:, 0])], seen[:, 2])


@pytest.mark.slow
@pytest.mark.parametrize("num_extends", [16, pytest.param(250, marks=pytest.mark.full)])
def test_rows_when_a_small_ring_goes_round_then_none_is_torn_and_the_newest_of_each_writer_are_left(
    client: tdserve.Client, name: str, tmp_path: Path, num_extends: int
) -> None:
    capacity = 2048
    replay = client.create_replay(name, example(CHANNEL_FLOATS), capacity)
    load = Load(client, replay, tmp_path, num_extends=num_extends, num_floats=CHANNEL_FLOATS)
    with load.fleet:
        load.finish()
    _, ids = content_of(replay)
    assert len(ids) == len(np.unique(ids)) == capacity
    for writer in range(NUM_WRITERS):
        left = np.sort(ids[ids // MAX_NUMBERS == writer]) % MAX_NUMBERS
        assert np.array_equal(left, np.arange(load.num_each - len(left), load.num_each))
    load.seen()


NUM_CELLS = 64


def drawn(client: tdserve.Client, name: str) -> NDArray[np.int64]:
    """Returns how often four clients together draw each row."""
    task = ("count", {"name": name, "num_rows": 500, "num_samples": 100, "num_cells": NUM_CELLS})
    with Fleet(client, task, task, task, task) as fleet:
        fleet.wait_all("counted")
        return np.asarray(np.array([fleet.numbers(child, "counted") for child in range(4)]).sum(axis=0))


@pytest.mark.slow
def test_sample_when_uniform_and_four_draw_then_every_row_is_equally_likely(client: tdserve.Client, name: str) -> None:
    client.create_replay(name, example(4), NUM_CELLS).extend(checked_rows(0, 0, NUM_CELLS, 4))
    counts = drawn(client, name)
    assert counts.sum() == 4 * 100 * 500
    assert chi_square.statistic(counts) < chi_square.limit(NUM_CELLS)


@pytest.mark.slow
@pytest.mark.parametrize("client", ["gloo"], indirect=True)  # control draws, whatever carries the rows
def test_sample_when_prioritized_and_four_draw_then_rows_come_by_their_priorities(
    client: tdserve.Client, name: str
) -> None:
    sampler = tdserve.Prioritized(alpha=0.7, beta=0.5, eps=0.01)
    replay = client.create_replay(name, example(4), NUM_CELLS, sampler=sampler)
    priority = np.linspace(0.0, 5.0, NUM_CELLS)
    replay.extend(checked_rows(0, 0, NUM_CELLS, 4), priority=priority)
    replay.update_priority([0, 1], [3.0, 7.5])
    priority[:2] = 3.0, 7.5
    power = (priority + 0.01) ** 0.7
    probability = power / power.sum()
    counts = drawn(client, name)
    assert chi_square.statistic(counts, probability) < chi_square.limit(NUM_CELLS)
    batch = replay.sample(256)
    index = batch["index"].numpy()
    assert np.allclose(batch["priority"].numpy(), priority[index], rtol=1e-6)
    assert np.allclose(batch["probability"].numpy(), probability[index], rtol=1e-5)
    weight = (probability / probability.min()) ** -0.5
    assert np.allclose(batch["priority_weight"].numpy(), weight[index], rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("client", ["gloo"], indirect=True)  # control draws, whatever carries the rows
def test_ratio_when_writers_and_samplers_run_free_then_stays_within_its_error_buffer(
    client: tdserve.Client, name: str
) -> None:
    ratio, min_size, buffer, num_each = 4.0, 64, 256.0, 150
    limiter = tdserve.SampleToInsertRatio(ratio, min_size=min_size, error_buffer=buffer)
    num_inserts = 2 * num_each * 32
    num_calls = int(ratio * (num_inserts - min_size)) // 3 // 48
    # A row that is overwritten while it is sampled is replaced by another draw, which counts too.
    replay = client.create_replay(name, example(4), num_inserts, limiter=limiter)
    writing = {"name": name, "num_calls": num_each, "num_rows": 32}
    sampling = ("keep_ratio", {"name": name, "writer": -1, "num_calls": num_calls, "num_rows": 48})
    found: list[tuple[int, int]] = []

    def is_over() -> bool:
        info = replay.info()
        found.append((info["inserts"], info["samples"]))
        return found[-1] == (num_inserts, 3 * num_calls * 48)

    writers = [("keep_ratio", {**writing, "writer": writer}) for writer in (0, 1)]
    with Fleet(client, *writers, *[sampling] * 3) as fleet:
        wait_for(is_over, "the end of all inserts and samples", timeout_s=300.0)
        fleet.wait_all("over")
    is_over()
    inserts, samples = np.array(found).T
    diff = inserts * ratio - samples
    is_full = inserts >= min_size
    assert len(np.unique(diff)) > 5, "looked at under load"
    assert (samples[~is_full] == 0).all()
    assert diff[is_full].max() <= min_size * ratio + buffer
    assert diff[is_full].min() >= min_size * ratio - buffer


@pytest.mark.slow
@pytest.mark.parametrize("sampler", [tdserve.Prioritized(alpha=1.0), tdserve.WithoutReplacement(), tdserve.Lifo()])
def test_sample_when_it_has_very_many_rows_then_each_has_its_own_columns_and_those_that_differ_do(
    client: tdserve.Client, name: str, sampler: Any
) -> None:
    num_rows, num_drawn = 50_000, 40_000
    replay = client.create_replay(name, TensorDict({"x": torch.tensor(0)}, []), num_rows, sampler=sampler)
    is_prioritized = sampler.kind == "prioritized"
    priority = torch.arange(num_rows) + 1.0
    for begin in range(0, num_rows, num_rows // 2):
        part = torch.arange(begin, begin + num_rows // 2)
        replay.extend(TensorDict({"x": part}, [len(part)]), priority=priority[part] if is_prioritized else None)
    for _ in range(2):
        batch = replay.sample(num_drawn)
        assert torch.equal(batch["x"], batch["index"])
        if is_prioritized:
            assert torch.equal(batch["priority"], priority[batch["x"]])
        else:
            assert len(batch["x"].unique()) == num_drawn
        if sampler.kind == "lifo":
            assert torch.equal(batch["x"], torch.arange(num_rows).flip(0)[:num_drawn])
