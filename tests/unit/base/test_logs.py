from __future__ import annotations

import logging
import re
import subprocess
import sys

import pytest

from tdserve.base.logs import SparseLog

CODE = """
import logging
from tdserve.base.logs import start_logging
start_logging({level!r}, process="tdserve worker 3")
logging.getLogger("tdserve.server").info("starts")
logging.getLogger("tdserve.server").warning("is slow")
"""


def logged(level: str) -> list[str]:
    """Returns what a process writes that logs from ``level`` on."""
    done = subprocess.run([sys.executable, "-c", CODE.format(level=level)], capture_output=True, text=True, check=True)
    return done.stderr.splitlines()


def test_start_logging_when_a_line_is_logged_then_it_has_time_level_and_process() -> None:
    first, second = logged("info")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} INFO tdserve worker 3: starts", first)
    assert second.endswith(" WARNING tdserve worker 3: is slow")


def test_start_logging_when_only_warnings_are_asked_for_then_the_rest_is_left_out() -> None:
    assert [line.rpartition(": ")[2] for line in logged("warning")] == ["is slow"]


def test_sparse_log_when_much_is_warned_of_then_one_line_and_how_many_were_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sparse = SparseLog(logging.getLogger("tdserve.server"), interval_s=0.05)
    sparse.warn("first")
    while len(caplog.records) < 2:
        sparse.warn("again")
    first, second = (record.getMessage() for record in caplog.records)
    assert first == "first"
    assert re.fullmatch(r"again \(\d+ more like it before\)", second)
