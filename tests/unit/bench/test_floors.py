from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import repeat
from pathlib import Path

import pytest
from tensordict import TensorDict

from tdserve.bench import workload_data
from tdserve.bench.floor_link import FloorLink
from tdserve.bench.floors import MappedRows, make_fresh_memcpy, make_memcpy
from tdserve.bench.measure import Pacing, Task, alternate

PACING = Pacing(0.005)


@pytest.fixture(scope="module")
def link() -> Iterator[FloorLink]:
    with closing(FloorLink()) as link:
        yield link


def test_gloo_floor_when_a_round_is_done_then_the_next_fills_the_round(link: FloorLink) -> None:
    floor = link.make_floor(out=64, back=64)
    first, second = floor.run_round(Pacing(0.02)), floor.run_round(Pacing(0.02))
    assert len(first.op_s) == 4
    assert len(second.op_s) == max(2, int(0.02 * first.ops_per_s))


def test_gloo_floors_when_run_in_turn_then_every_kind_moves_its_bytes(link: FloorLink) -> None:
    tasks = {
        "out": link.make_floor(out=1_000),
        "in": link.make_floor(back=1_000),
        "fetch": link.make_floor(out=64, back=1_000, message_nbytes=300),
        "store": link.make_floor(out=1_000, back=64),
        "echo": link.make_floor(out=1_000, back=1_000),
    }
    found = alternate(tasks, 2, PACING)
    assert all(each.ops_per_s > 0 for series in found.values() for each in series)


@pytest.mark.parametrize("memcpy", [make_memcpy, make_fresh_memcpy])
def test_memcpy_when_run_then_takes_time(memcpy: Callable[[int], Task]) -> None:
    assert memcpy(1 << 20).run_round(PACING).elapsed_s > 0


def test_mapped_rows_when_made_then_repeat_the_pool_until_full(tmp_path: Path) -> None:
    pool = workload_data.make_transitions(8)
    MappedRows(pool, 20, tmp_path / "rows")
    stored = TensorDict.load_memmap(tmp_path / "rows")
    expected = TensorDict.cat([pool.rows, pool.rows, pool.rows[:4]], 0)
    workload_data.check_equal(stored, expected, what="mapped rows")


def test_mapped_rows_when_written_then_go_around_the_ring(tmp_path: Path) -> None:
    pool = workload_data.make_transitions(8)
    rows, batch = MappedRows(pool, 20, tmp_path / "rows"), pool.rows[4:8]
    done = rows.write(repeat(batch)).run_round(Pacing(0.0, min_ops=6))
    stored = TensorDict.load_memmap(tmp_path / "rows")
    assert len(done.op_s) == 6
    workload_data.check_equal(stored, TensorDict.cat([batch] * 5, 0), what="mapped rows")


@pytest.mark.parametrize(
    "read",
    [
        lambda rows: rows.gather(5),
        lambda rows: rows.select(5, is_fresh=True),
        lambda rows: rows.select(5, is_fresh=False),
    ],
)
def test_mapped_rows_when_read_in_any_way_then_time_every_read(
    tmp_path: Path, read: Callable[[MappedRows], Task]
) -> None:
    rows = MappedRows(workload_data.make_transitions(8), 20, tmp_path / "rows")
    assert len(read(rows).run_round(Pacing(0.0, min_ops=3)).op_s) == 3


@pytest.mark.parametrize(("source_nbytes", "ring_nbytes"), [(64, 100), (1, 1)])
def test_memcpy_ring_when_it_comes_to_an_end_then_starts_again(source_nbytes: int, ring_nbytes: int) -> None:
    task = make_memcpy(32, source_nbytes=source_nbytes, ring_nbytes=ring_nbytes)
    assert len(task.run_round(Pacing(0.0, min_ops=9)).op_s) == 9
