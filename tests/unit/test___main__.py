"""tdserve/__main__.py: ``python -m tdserve`` is the console script."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_module_when_run_then_is_the_console_script() -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "tdserve", "nothing"], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("tdserve: No such command 'nothing'")
