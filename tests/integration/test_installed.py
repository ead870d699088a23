"""The installed package works wherever Python is started."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

from tests.processes import REPOSITORY

pytestmark = pytest.mark.integration


@pytest.mark.slow
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


@pytest.mark.slow
def test_files_when_installed_from_a_wheel_then_are_all_there(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77")
    source, installed = tmp_path / "source", tmp_path / "installed"
    shutil.copytree(REPOSITORY / "tdserve", source / "tdserve", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    build = [sys.executable, "-c", "import setuptools; setuptools.setup()", "bdist_wheel"]
    subprocess.run(build, cwd=source, stdout=subprocess.DEVNULL, check=True)
    (wheel,) = (source / "dist").glob("*.whl")
    shutil.unpack_archive(wheel, installed, "zip")
    missing = {
        str(path.relative_to(REPOSITORY))
        for path in (REPOSITORY / "tdserve").rglob("*")
        if path.is_file() and path.suffix != ".pyc" and not (installed / path.relative_to(REPOSITORY)).is_file()
    }
    assert missing == set()
    topics = sorted(page.stem for page in (REPOSITORY / "tdserve" / "guide").glob("*.md"))
    code = "import sys; sys.path.insert(0, sys.argv[1]); from tdserve.cli.main import main; main(['guide'])"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, str(installed)], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert [line.split()[0] for line in done.stdout.splitlines()[1:]] == topics


@pytest.mark.full
def test_types_when_a_program_uses_the_package_then_known_to_its_mypy(tmp_path: Path) -> None:
    mypy = Path(sys.executable).with_name("mypy")
    if not mypy.is_file():
        pytest.skip("mypy is not installed here")
    program = tmp_path / "program.py"
    program.write_text(
        "import tdserve\n"
        "from tensordict import TensorDict\n"
        "def learn(client: tdserve.Client, rows: TensorDict) -> int:\n"
        "    table = client.create_replay('replay', rows[0], 1000, sampler=tdserve.Prioritized(alpha=0.6))\n"
        "    table.extend(rows)\n"
        "    reveal_type(table)\n"
        "    names: str = client.stores()\n"
        "    return len(table.sample(32))\n"
    )
    command = [str(mypy), "--strict", "--no-incremental", "--config-file", os.devnull, str(program)]
    environment = {**os.environ, "MYPYPATH": str(REPOSITORY)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    found = [line.partition("program.py:")[2] for line in done.stdout.splitlines() if "program.py:" in line]
    assert found[0] == '6: note: Revealed type is "tdserve.client.tables.replay.ReplayHandle"', done.stdout
    assert len(found) == 2, done.stdout
    assert found[1].startswith("7: error: Incompatible types in assignment"), done.stdout
