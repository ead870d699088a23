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


INTERRUPTED = """
import os, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), 2)
sys.meta_path.insert(0, Finder())
sys.argv = ["tdserve", "version"]
from tdserve.__main__ import main
sys.exit(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("module", ["tdserve.base.config", "tdserve.cli.main", "tdserve.cli.trying.version"])
def test_module_when_interrupted_while_it_imports_then_ends_without_a_traceback(module: str) -> None:
    command = [sys.executable, "-c", INTERRUPTED.format(module=module)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "\n")
