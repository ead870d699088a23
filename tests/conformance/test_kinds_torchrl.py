"""The kinds of torchrl, where it is installed: importing it changes a process, so that they have one to themselves."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.integration
@pytest.mark.skipif(importlib.util.find_spec("torchrl") is None, reason="torchrl is not installed")
def test_exam_when_torchrl_is_there_then_passed() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore::DeprecationWarning"]
    done = subprocess.run(
        [*command, "tests/conformance/torchrl_exam.py"],
        check=False,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
