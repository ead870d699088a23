from __future__ import annotations

import io
import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from rich.console import Console

from tdserve.base.errors import InvalidRequestError
from tdserve.bench.bench_options import BenchOptions
from tdserve.bench.child import PACKAGE_FOLDER
from tdserve.bench.figures import Scale, make_figure
from tdserve.bench.measure import Round
from tdserve.bench.report import write_json
from tdserve.bench.runs import run
from tests.processes import wait_for


def process_ids_below(pid: int) -> list[str]:
    """The processes that any thread of this one has started, and theirs."""
    found: list[str] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that ends meanwhile
            found += path.read_text().split()
    return [*found, *(below for child in found for below in process_ids_below(int(child)))]


@pytest.mark.parametrize(
    "options",
    [
        BenchOptions(workloads=("music",)),
        BenchOptions(repeats=0),
        BenchOptions(json_path=Path("/nowhere/figures.json")),
        BenchOptions(plot_path=Path("/nowhere/figures.png")),
        BenchOptions(compare_path=Path("/nowhere/figures.json")),
    ],
)
def test_bench_when_asked_for_what_is_not_there_then_refuses_before_anything_starts(
    options: BenchOptions, tmp_path: Path
) -> None:
    with pytest.raises(InvalidRequestError):
        run(options)


def test_bench_when_the_run_to_compare_with_had_other_sizes_then_refuses(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    write_json(path, machine={}, options=BenchOptions(quick=True), figures=[], seconds=0.0)
    with pytest.raises(InvalidRequestError, match="add --quick"):
        run(BenchOptions(compare_path=path))


@pytest.mark.slow
@pytest.mark.integration
def test_bench_when_run_then_prints_and_writes_machine_and_figures_and_leaves_nothing(tmp_path: Path) -> None:
    path, parent = tmp_path / "figures.json", tmp_path / "parent"
    parent.mkdir()
    console = Console(file=io.StringIO(), width=120)
    saved, picture = tmp_path / "saved.json", tmp_path / "figures.png"
    earlier = make_figure("small", "send a small tensordict", Scale("us"), subject=[Round((1.0,), 1.0)], floors={})
    write_json(saved, machine={}, options=BenchOptions(quick=True), figures=[earlier], seconds=0.0)
    options = BenchOptions(
        workloads=("small",),
        quick=True,
        repeats=1,
        json_path=path,
        parent=parent,
        compare_path=saved,
        plot_path=picture,
    )
    assert run(options, console) == 0
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert all(part in text for part in ("cores", "memcpy into touched pages", "gloo round trip", "get one scalar"))
    assert f"compared with {saved}" in text
    assert "small: send a small tensordict" in text
    assert picture.read_bytes().startswith(b"\x89PNG")
    content = json.loads(path.read_text())
    assert {figure["workload"] for figure in content["figures"]} == {"floors", "small"}
    assert list(parent.iterdir()) == []


@pytest.mark.integration
@pytest.mark.full
def test_bench_when_terminated_in_the_middle_then_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from tdserve.bench.runs import run, BenchOptions;"
        "run(BenchOptions(workloads=('pixels',), quick=True, repeats=1000, parent=Path(sys.argv[1])))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=PACKAGE_FOLDER,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("cores")
        wait_for(lambda: len(process_ids_below(process.pid)) >= 2, "the processes of the bench")
        children = process_ids_below(process.pid)
        process.terminate()
        process.communicate(timeout=60.0)
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children), "their end")
    assert list(tmp_path.iterdir()) == []
