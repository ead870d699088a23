"""The package as pip has installed it, from wherever Python is started."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

from tests.integration.processes import REPOSITORY

pytestmark = pytest.mark.integration


def test_import_when_python_runs_above_a_clone_of_this_name_then_finds_the_package(tmp_path: Path) -> None:
    try:
        distribution("tdserve")
    except PackageNotFoundError:
        pytest.skip("tdserve is not installed here")
    (tmp_path / "tdserve").symlink_to(REPOSITORY)  # a folder that Python takes for a namespace package
    code = "import tdserve; print(tdserve.Server.__name__)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env={}, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("Server\n", "")
