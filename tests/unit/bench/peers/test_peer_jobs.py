from __future__ import annotations

import pytest

from tdserve.bench.peers.peer_jobs import PeerJob, make_jobs


@pytest.mark.parametrize(("unit", "amount", "expected"), [("rows/s", 64, 640.0), ("GB/s", 0.5, 5.0), ("ms", 1, 100.0)])
def test_convert_when_steps_in_a_second_are_known_then_the_figure_is_of_the_unit(
    unit: str, amount: float, expected: float
) -> None:
    first = make_jobs(is_quick=True)[0]
    job = PeerJob("x", unit, amount, first.prepare)  # type: ignore[arg-type]
    assert job.convert(10.0) == pytest.approx(expected)


def test_jobs_when_made_then_labels_differ() -> None:
    labels = [job.label for job in make_jobs(is_quick=True)]
    assert len(set(labels)) == len(labels)
