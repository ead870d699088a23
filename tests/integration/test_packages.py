"""sdist and wheel: each holds what it must, and a fresh environment runs the demo from the wheel alone."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.processes import REPOSITORY
from tests.sbom import LIST_PACKAGES, SCRIPT, check_bill

pytestmark = pytest.mark.integration

CONSTRAINTS = REPOSITORY / "deploy" / "constraints.txt"
BUILD = "import sys, setuptools.build_meta as backend; print(getattr(backend, sys.argv[1])(sys.argv[2]))"
VERSION_LINE = re.compile(r'^version = "(.+)"$', re.MULTILINE)


class Packages(NamedTuple):
    """What was built."""

    sdist: Path
    wheel: Path
    wheel_of_sdist: Path


def build(kind: str, source: Path, target: Path) -> Path:
    """Builds one package by the backend that pyproject.toml names, as pip does, without asking an index."""
    command = [sys.executable, "-c", BUILD, f"build_{kind}", str(target)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Packages:
    """An sdist and a wheel of the tree, and a wheel of that sdist alone."""
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("packages")
    source = folder / "source"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", ".*", "tdserve-demo", "tdserve-data")
    shutil.copytree(REPOSITORY, source, ignore=ignored)
    wheel = build("wheel", source, folder)
    sdist = build("sdist", source, folder)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    (folder / "of-sdist").mkdir()
    return Packages(sdist, wheel, build("wheel", unpacked, folder / "of-sdist"))


def read_wheel(path: Path) -> dict[str, bytes]:
    """Returns the files of a wheel with their content. The list of files with their sums is without its order."""
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    (record,) = (name for name in files if name.endswith("/RECORD"))
    return {**files, record: b"\n".join(sorted(files[record].splitlines()))}


@pytest.mark.full
def test_wheel_when_built_from_the_sdist_then_equals_that_of_the_tree(packages: Packages) -> None:
    tree, unpacked = read_wheel(packages.wheel), read_wheel(packages.wheel_of_sdist)
    assert tree.keys() == unpacked.keys()
    assert [name for name in tree if tree[name] != unpacked[name]] == []
    assert packages.wheel.name == packages.wheel_of_sdist.name


@pytest.mark.slow
def test_wheel_when_built_then_holds_the_package_and_nothing_else(packages: Packages) -> None:
    version = find_version()
    names = {name.partition("/")[0] for name in read_wheel(packages.wheel)}
    assert names == {"tdserve", f"tdserve-{version}.dist-info"}
    assert packages.wheel.name == f"tdserve-{version}-py3-none-any.whl"
    assert packages.sdist.name == f"tdserve-{version}.tar.gz"


def test_sdist_when_built_then_has_the_licence_and_what_names_the_build(packages: Packages) -> None:
    with tarfile.open(packages.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert names >= {"LICENSE", "README.md", "pyproject.toml", "tdserve/py.typed", "tdserve/__init__.pyi"}


def find_version() -> str:
    """Returns the version in pyproject.toml."""
    found = VERSION_LINE.search((REPOSITORY / "pyproject.toml").read_text())
    assert found is not None
    return found[1]


def test_version_when_looked_for_then_is_in_one_place_and_heads_the_changes() -> None:
    version = find_version()
    literal = re.compile(rf"""["'=]{re.escape(version)}["'\s]""")
    suffixes = {".py", ".pyi", ".toml", ".yml", ".yaml", ".txt"}
    paths = [
        REPOSITORY / "docker-compose.yml",
        *(REPOSITORY / "deploy").iterdir(),
        *(REPOSITORY / "tdserve").rglob("*"),
    ]
    with_it = [path for path in paths if path.suffix in suffixes and literal.search(path.read_text())]
    assert with_it == [], "the version belongs into pyproject.toml alone"
    headings = re.findall(r"^## (\S+)", (REPOSITORY / "tdserve" / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == version


class Environment:
    """A virtual environment of its own, with ordinary pip.

    Args:
        folder: For the environment.
    """

    def __init__(self, folder: Path) -> None:
        self._bin = folder / "bin"
        self.python = self._bin / "python"
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)

    def install(self, *requirements: str) -> str:
        """Installs what pip finds; returns what it printed, empty if it succeeded."""
        command = [str(self.python), "-m", "pip", "install", "-q", "-c", str(CONSTRAINTS), *requirements]
        done = subprocess.run(command, cwd=self._bin, capture_output=True, text=True, check=False)
        return done.stderr if done.returncode else ""

    def run(self, *command: str, folder: Path) -> str:
        """Runs one of its programs elsewhere, without what this process has set for Python; returns what it printed."""
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TDSERVE", "VIRTUAL"))
        }
        path = f"{self._bin}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            command, cwd=folder, env={**kept, "PATH": path}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.mark.full
@pytest.mark.timeout(1800)  # torch has to be unpacked, and perhaps downloaded
def test_wheel_when_a_fresh_environment_has_nothing_else_then_the_demo_and_its_bill_of_materials(
    packages: Packages, tmp_path: Path
) -> None:
    environment = Environment(tmp_path / "environment")
    if missing := environment.install("click"):
        pytest.skip(f"pip finds nothing here: {missing}")
    assert environment.install(f"{packages.wheel}[demo]") == ""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    place = environment.run("python", "-c", "import tdserve; print(tdserve.__file__)", folder=elsewhere)
    assert Path(place.strip()).is_relative_to(tmp_path / "environment")
    assert json.loads(environment.run("tdserve", "version", "--json", folder=elsewhere))["tdserve"] == find_version()
    shown = environment.run("tdserve", "demo", "--max-seconds", "30", folder=elsewhere)
    figures = json.loads((elsewhere / "tdserve-demo" / "figures.json").read_text())
    assert figures["num_updates"] > 0, shown
    bill = elsewhere / "bill.json"
    environment.run("sh", str(SCRIPT), str(environment.python), str(bill), folder=elsewhere)
    check_bill(bill, environment.run("python", "-c", LIST_PACKAGES, folder=elsewhere))
