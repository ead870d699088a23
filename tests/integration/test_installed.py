"""The package as pip has installed it, from wherever Python is started."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

from tests.processes import REPOSITORY

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


def test_guide_when_installed_from_a_wheel_then_is_there(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77")
    source, installed = tmp_path / "source", tmp_path / "installed"
    shutil.copytree(REPOSITORY / "tdserve", source / "tdserve", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    build = [sys.executable, "-c", "import setuptools; setuptools.setup()", "bdist_wheel"]
    subprocess.run(build, cwd=source, stdout=subprocess.DEVNULL, check=True)
    (wheel,) = (source / "dist").glob("*.whl")
    shutil.unpack_archive(wheel, installed, "zip")
    topics = sorted(page.stem for page in (REPOSITORY / "tdserve" / "guide").glob("*.md"))
    code = "import sys; sys.path.insert(0, sys.argv[1]); from tdserve.cli.main import main; main(['guide'])"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, str(installed)], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert [line.split()[0] for line in done.stdout.splitlines()[1:]] == topics
