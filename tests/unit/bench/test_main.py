from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from tdserve.bench.main import run
from tdserve.bench.options import BenchOptions
from tdserve.errors import InvalidRequestError


@pytest.mark.parametrize("options", [BenchOptions(workloads=("music",)), BenchOptions(repeats=0)])
def test_bench_when_asked_for_what_is_not_there_then_refuses_before_anything_starts(
    options: BenchOptions, tmp_path: Path
) -> None:
    with pytest.raises(InvalidRequestError):
        run(options)


@pytest.mark.integration
def test_bench_when_run_then_prints_and_writes_machine_and_figures_and_leaves_nothing(tmp_path: Path) -> None:
    path, parent = tmp_path / "figures.json", tmp_path / "parent"
    parent.mkdir()
    console = Console(file=io.StringIO(), width=120)
    options = BenchOptions(workloads=("small",), quick=True, repeats=1, json_path=path, parent=parent)
    assert run(options, console) == 0
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert all(part in text for part in ("cores", "memcpy into touched pages", "gloo round trip", "get one scalar"))
    content = json.loads(path.read_text())
    assert {figure["workload"] for figure in content["figures"]} == {"floors", "small"}
    assert list(parent.iterdir()) == []
