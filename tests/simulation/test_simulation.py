"""Random schedules of the simulation, in processes of their own: the simulation replaces the clocks of its process."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.processes import REPOSITORY


def run_simulation(*arguments: str) -> list[str]:
    """Runs schedules; returns the lines that the simulation prints. Fails the test if one fails, with its seed."""
    command = [sys.executable, "-m", "tests.simulation", *arguments]
    run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout.splitlines()


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("seed", "num_schedules"),
    [(26, 200), *(pytest.param(seed, 1000, marks=pytest.mark.full) for seed in range(2, 26))],
)
def test_schedules_when_anything_may_fail_at_any_step_then_what_was_promised_holds_and_a_seed_repeats_its_run(
    seed: int, num_schedules: int
) -> None:
    lines = run_simulation("--schedules", str(num_schedules), "--seed", str(seed))
    assert lines[0].startswith(f"{num_schedules} schedules")
    assert any(line.startswith("crashes") for line in lines)
    assert run_simulation("--only", f"{seed}000000")[-1] == lines[-1]
