from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import tdserve
from tdserve.base.errors import list_error_classes

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


def test_export_when_it_is_an_error_that_a_call_may_raise_then_is_there() -> None:
    """The guide names errors as ``tdserve.X``, and callers catch them so."""
    classes = list_error_classes()
    exported = {name: getattr(tdserve, name, None) for name in classes}
    assert exported == classes
