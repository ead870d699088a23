"""The README's tour runs as written, word by word, in a process of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

README = Path(__file__).parents[2] / "README.md"


def test_tour_when_run_as_written_then_every_line_holds(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 7
    script = tmp_path / "tour.py"
    script.write_text("\n".join(blocks))
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "['batch', 'chats', 'notes', 'policy', 'prioritized', 'recent', 'replay', 'rollouts', 'todo']" in done.stdout


def test_commands_when_named_in_the_readme_then_ci_runs_the_test_command() -> None:
    run = (README.parent / ".ci" / "run").read_text()
    for step in ("python3 -m venv .venv", "-c deploy/constraints.txt -e '.[dev]'", ".venv/bin/python -m pytest"):
        assert step in README.read_text()
        assert step in run


def test_guarantees_when_listed_then_each_names_tests_that_there_are() -> None:
    section = README.read_text().partition("## Guarantees")[2].partition("\n## ")[0]
    rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 15
    for guarantee, *_, named in rows:
        files = re.findall(r"`(?:(tests/\S+)/)?(test_\w+)`", named)
        assert files, guarantee
        for folder, name in files:
            assert (README.parent / (folder or "tests/integration") / f"{name}.py").exists(), (guarantee, name)
