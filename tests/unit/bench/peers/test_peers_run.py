from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from tdserve.bench.child import Child
from tdserve.bench.peers.contender import Contender
from tdserve.bench.peers.peer_jobs import make_jobs, run_jobs
from tdserve.bench.peers.peers_run import CONTENDERS, make_table


@pytest.mark.slow
@pytest.mark.parametrize("kind", CONTENDERS, ids=lambda kind: kind.__name__)
def test_jobs_when_run_by_a_system_then_each_has_a_figure_and_reads_what_was_written(
    kind: type[Contender], tmp_path: Path
) -> None:
    if missing := kind.find_missing():
        pytest.skip(f"needs {missing}")
    with closing(Child(run_jobs, kind, tmp_path, True)) as client:
        assert client.recv() == kind.label
        for job in make_jobs(is_quick=True):
            assert job.convert(client.ask((job.label, 0.0))) > 0.0


def test_table_when_a_system_lacks_a_figure_then_its_cell_is_empty_and_others_have_medians() -> None:
    jobs = make_jobs(is_quick=True)[:2]
    first, second = (job.label for job in jobs)
    figures = {"one": {first: [3.0, 1.0, 2.0], second: []}, "two": {first: [1234.4], second: [0.12345]}}
    assert make_table(jobs, figures) == [
        "|  | one | two |",
        "|---|---|---|",
        f"| {first}, rows/s | 2 | 1,234 |",
        f"| {second}, rows/s |  | 0.123 |",
    ]
