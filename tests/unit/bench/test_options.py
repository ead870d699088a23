from __future__ import annotations

import subprocess
import sys

import pytest

from tdserve.bench.bench_options import BenchOptions


@pytest.mark.parametrize(
    ("options", "num_rounds"), [(BenchOptions(), 5), (BenchOptions(quick=True), 2), (BenchOptions(repeats=9), 9)]
)
def test_rounds_when_not_asked_for_then_depend_on_quick(options: BenchOptions, num_rounds: int) -> None:
    assert options.num_rounds == num_rounds


def test_options_when_imported_by_the_command_line_then_load_no_torch() -> None:
    code = "import sys, tdserve.bench.bench_options; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
