"""Damaged files of a root: the check finds them, and a server answers with an error or the right content.

A process of its own damages them: it forks for each check, and so has no threads.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.processes import REPOSITORY

pytestmark = pytest.mark.integration


def damage_roots(num_inputs: int, seed: int) -> str:
    """Has roots damaged; returns what came of it. Fails the test if there was a fault."""
    command = [sys.executable, "-m", "tests.fuzz", "--roots", "--inputs", str(num_inputs), "--seed", str(seed)]
    run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_roots_when_damaged_then_found_and_no_content_is_wrong_and_no_process_dies() -> None:
    outcomes = damage_roots(15, 111)
    assert "check: damaged" in outcomes
    assert "read of small: right" in outcomes


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_roots_when_damaged_in_very_many_ways_then_likewise() -> None:
    damage_roots(1_000, 2)
