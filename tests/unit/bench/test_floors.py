from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from itertools import cycle
from pathlib import Path

import pytest
from tensordict import TensorDict

from tdserve.bench import content
from tdserve.bench.floor_link import FloorLink
from tdserve.bench.floors import MappedRows, make_fresh_memcpy, make_gloo_floor, make_ring_memcpy, make_touched_memcpy
from tdserve.bench.measure import Pacing, alternate

PACING = Pacing(0.005)


@pytest.fixture(scope="module")
def link() -> Iterator[FloorLink]:
    with closing(FloorLink()) as link:
        link.connect()
        yield link


def test_gloo_floor_when_a_round_is_done_then_the_next_fills_the_round(link: FloorLink) -> None:
    floor = make_gloo_floor(link, out=64, back=64)
    first, second = floor.run_round(Pacing(0.02)), floor.run_round(Pacing(0.02))
    assert len(first.op_s) == 4
    assert len(second.op_s) == max(2, int(0.02 * first.ops_per_s))


def test_gloo_floors_when_run_in_turn_then_every_kind_moves_its_bytes(link: FloorLink) -> None:
    tasks = {
        "out": make_gloo_floor(link, out=1_000),
        "in": make_gloo_floor(link, back=1_000),
        "fetch": make_gloo_floor(link, out=64, back=1_000, message_nbytes=300),
        "store": make_gloo_floor(link, out=1_000, back=64),
        "echo": make_gloo_floor(link, out=1_000, back=1_000),
    }
    found = alternate(tasks, 2, PACING)
    assert all(each.ops_per_s > 0 for series in found.values() for each in series.rounds)


@pytest.mark.parametrize("memcpy", [make_touched_memcpy, make_fresh_memcpy])
def test_memcpy_when_run_then_takes_time(memcpy: object) -> None:
    assert callable(memcpy)
    assert memcpy(1 << 20).run_round(PACING).elapsed_s > 0


def test_mapped_rows_when_made_then_repeat_the_pool_until_full(tmp_path: Path) -> None:
    pool = content.make_transitions(8)
    MappedRows(pool, 20, tmp_path / "rows")
    stored = TensorDict.load_memmap(tmp_path / "rows")
    expected = TensorDict.cat([pool, pool, pool[:4]], 0)
    content.check_equal(stored, expected, what="mapped rows")


def test_mapped_rows_when_written_then_go_around_the_ring(tmp_path: Path) -> None:
    pool = content.make_transitions(8)
    rows = MappedRows(pool, 20, tmp_path / "rows")
    done = rows.write(cycle([pool[4:8]]).__next__).run_round(Pacing(0.0, min_ops=6))
    stored = TensorDict.load_memmap(tmp_path / "rows")
    assert len(done.op_s) == 6
    expected = TensorDict.cat([pool[4:8]] * 5, 0)
    content.check_equal(stored, expected, what="mapped rows")


def test_mapped_rows_when_gathered_then_time_every_gather(tmp_path: Path) -> None:
    rows = MappedRows(content.make_transitions(8), 20, tmp_path / "rows")
    assert len(rows.gather(5).run_round(Pacing(0.0, min_ops=3)).op_s) == 3


@pytest.mark.parametrize("way", ["select", "select_into"])
def test_mapped_rows_when_selected_leaf_by_leaf_then_time_every_selection(tmp_path: Path, way: str) -> None:
    rows = MappedRows(content.make_transitions(8), 20, tmp_path / "rows")
    assert len(getattr(rows, way)(5).run_round(Pacing(0.0, min_ops=3)).op_s) == 3


@pytest.mark.parametrize(("source_nbytes", "ring_nbytes"), [(64, 100), (1, 1)])
def test_memcpy_ring_when_it_comes_to_an_end_then_starts_again(source_nbytes: int, ring_nbytes: int) -> None:
    task = make_ring_memcpy(32, source_nbytes=source_nbytes, ring_nbytes=ring_nbytes)
    assert len(task.run_round(Pacing(0.0, min_ops=9)).op_s) == 9
