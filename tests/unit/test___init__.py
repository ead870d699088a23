from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import gc, tdserve
tdserve.TDServeError
was_on = gc.isenabled()
gc.disable()
tdserve.Fifo
print(was_on, gc.isenabled())
"""


@pytest.mark.slow
def test_export_when_loaded_then_garbage_is_collected_as_before() -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]
