"""README and guide: every example runs as written, every link leads somewhere, every guarantee has its tests."""

from __future__ import annotations

import fnmatch
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tdserve.base.failpoints import FAILPOINTS
from tests.integration.guide_pages import python_of

pytestmark = pytest.mark.integration

REPOSITORY = Path(__file__).parents[2]
README = REPOSITORY / "README.md"
PAGES = [README, *sorted((REPOSITORY / "tdserve" / "guide").glob("*.md"))]
OTHERS = [REPOSITORY / path for path in ("deploy/README.md", "tdserve/bench/README.md", "tests/conformance/README.md")]
GUARANTEES = REPOSITORY / "tdserve" / "guide" / "guarantees.md"

EXTRAS = ("torchrl",)
"""Pages about a package that may be missing. They have its name."""

ELSEWHERE = ("transfer-queue",)
"""Pages whose examples run in the test of their module, where Ray runs already."""

RUN_PAGES = """
import os, runpy, sys
for script in sys.argv[1:]:
    os.chdir(os.path.dirname(script))
    print("page", script)
    runpy.run_path(script, run_name="__main__")
"""
"""All pages in one process, which imports torch once; each in a folder and with names of its own. Each is the main file
while it runs: processes that it starts import it."""


@pytest.mark.timeout(240)
def test_examples_when_run_as_written_then_every_line_holds(tmp_path: Path) -> None:
    scripts = []
    for page in PAGES:
        if page.stem in ELSEWHERE:
            continue
        if page.stem in EXTRAS and importlib.util.find_spec(page.stem) is None:
            continue
        if code := python_of(page).strip("\n"):
            script = tmp_path / page.stem / "page.py"  # asyncio.py would hide the module
            script.parent.mkdir()
            script.write_text(python_of(page))
            scripts.append(str(script))
            assert "assert " in code
    assert len(scripts) >= 8
    command = [sys.executable, "-m", "tests.lent.program", "-c", RUN_PAGES, *scripts]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=230, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("page ") == len(scripts)
    assert "['batch', 'policy', 'replay', 'todo']" in done.stdout


SPAWNING = """import multiprocessing; multiprocessing.set_start_method("spawn", force=True)  # as torchrl does\n"""


@pytest.mark.full
def test_datasets_when_run_as_a_file_with_spawned_processes_then_every_line_holds(tmp_path: Path) -> None:
    script = tmp_path / "page.py"
    script.write_text(SPAWNING + python_of(REPOSITORY / "tdserve" / "guide" / "datasets.md"))
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, str(script)]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def test_readme_when_measured_then_is_short() -> None:
    lines = README.read_text().splitlines()
    assert len(lines) <= 300
    assert [line for line in lines if line.startswith("| ") and len(line) > 250] == []


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_links_when_relative_then_lead_to_a_file_and_its_heading(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", linked.read_text(), flags=re.MULTILINE)
            assert anchor in {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}, target


def test_guide_when_listed_in_the_readme_then_every_page_once() -> None:
    listed = re.findall(r"^\| \[([\w-]+)\]\(tdserve/guide/\1\.md\)", README.read_text(), flags=re.MULTILINE)
    assert sorted(listed) == [page.stem for page in PAGES[1:]]


def test_places_when_named_for_developers_then_exist() -> None:
    pages = [(REPOSITORY / "tdserve" / "guide" / f"{topic}.md").read_text() for topic in ("architecture", "extending")]
    places = {place for text in pages for place in re.findall(r"`([\w/.]+)`", text) if "/" in place}
    assert len(places) > 10
    missing = [p for p in places if not ((REPOSITORY / "tdserve" / p).exists() or (REPOSITORY / p).exists())]
    assert missing == []


def test_commands_when_named_in_the_readme_then_ci_runs_the_test_command() -> None:
    run = (README.parent / ".ci" / "run").read_text()
    for step in ("python3 -m venv .venv", "-c deploy/constraints.txt -e '.[dev]'", ".venv/bin/python -m pytest"):
        assert step in README.read_text()
        assert step in run


def test_guarantees_when_listed_then_each_names_tests_that_there_are() -> None:
    rows = [line.split(" | ") for line in GUARANTEES.read_text().splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 15
    for guarantee, *_, named in rows:
        files = re.findall(r"`(?:(tests/\S+)/)?(test_\w+)`", named)
        assert files or "`tests/" in named, guarantee
        for folder, name in files:
            assert (REPOSITORY / (folder or "tests/integration") / f"{name}.py").exists(), (guarantee, name)


def test_guarantees_when_they_name_failpoints_or_simulated_stores_then_there_are_such() -> None:
    models = "".join(path.read_text() for path in (REPOSITORY / "tests" / "simulation").glob("*models.py"))
    kinds = set(re.findall(r'^    kind = "(\w+)"', models, re.MULTILINE))
    table = GUARANTEES.read_text()
    simulated = re.findall(r"simulation ((?:`\w+`(?:, )?)+)", table)
    assert {name for names in simulated for name in re.findall(r"\w+", names)} == kinds
    named = re.findall(r"failpoints ((?:`[\w.*-]+`(?:, )?)+)", table)
    assert len(named) >= 8
    for pattern in (name for names in named for name in re.findall(r"[\w.*-]+", names)):
        assert fnmatch.filter(FAILPOINTS, pattern), pattern
