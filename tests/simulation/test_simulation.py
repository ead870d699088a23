"""Random schedules of the simulation, in processes of their own: the simulation replaces the clocks of its process."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.processes import REPOSITORY


def run_schedules(num_schedules: int, seed: int) -> str:
    """Runs schedules; returns what the simulation prints. Fails the test if one fails, with its seed."""
    command = [sys.executable, "-m", "tests.simulation", "--schedules", str(num_schedules), "--seed", str(seed)]
    run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [1, 2, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(3, 51))])
def test_schedules_when_anything_may_fail_at_any_step_then_what_was_promised_holds(seed: int) -> None:
    assert run_schedules(500, seed).startswith("500 schedules")


def test_schedule_when_its_seed_is_repeated_then_the_same_happens() -> None:
    first, second = (run_schedules(20, 99).splitlines()[1:] for _ in range(2))
    assert first == second
    assert any(line.startswith("crashes") for line in first)
