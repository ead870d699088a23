from __future__ import annotations

import json
import logging
import re
import subprocess
import sys

import pytest

from tdserve.base import logs
from tdserve.base.errors import (
    CorruptDataError,
    InvalidRequestError,
    LocalProtocolError,
    ServerBusyError,
    StoreNotFoundError,
    TDServeError,
)
from tdserve.base.logs import BURST, MAX_LINE, SparseLog, choose_failure_level, start_logging

CODE = """
import logging
from tdserve.base.logs import start_logging
start_logging({level!r}, process="tdserve worker 3")
logging.getLogger("tdserve.server").info("starts")
logging.getLogger("tdserve.server").warning("is slow")
"""


def logged(level: str) -> list[str]:
    """Returns the output of a process that logs from ``level`` on."""
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
    num_warned = 1
    while not vars(caplog.records[-1])["num_left_out"]:  # a thread that waits for a processor leaves out none
        sparse.warn("again")
        num_warned += 1
    first, *others = caplog.records
    assert (first.getMessage(), {each.getMessage() for each in others}) == ("first", {"again"})
    assert vars(first)["num_left_out"] == 0
    assert sum(1 + vars(each)["num_left_out"] for each in caplog.records) == num_warned


HOSTILE = """
import logging, sys
from tdserve.base.logs import start_logging, name_request
start_logging("debug", process="tdserve", form={form!r})
log = logging.getLogger("tdserve.server")
log.warning("store %r, %s", "a", "<script>\\x1b[2J\\n2026-01-01 ERROR tdserve: forged\\x9b\\u202e\\ud800")
log.info("%s", "x" * 1_000_000)
try:
    int("secret value")
except ValueError:
    log.exception("a request failed", extra=name_request("3-17\\n"))
for number in range(1000):
    log.info("again %d", number)
"""


def logged_hostile(form: str) -> list[str]:
    """What a process writes that logs what strangers send."""
    command = [sys.executable, "-c", HOSTILE.format(form=form)]
    done = subprocess.run(command, capture_output=True, check=True)
    return done.stderr.decode().split("\n")[:-1]


@pytest.mark.parametrize("form", ["human", "json"])
def test_line_when_strangers_have_a_part_in_it_then_one_printable_short_line(form: str) -> None:
    lines = logged_hostile(form)
    assert len(lines) == 3 + BURST
    assert all(line.isprintable() and len(line) < 3 * MAX_LINE for line in lines)
    assert "<script>\\" in lines[0]
    assert "1000000 characters" in lines[1]
    assert "secret value" not in "".join(lines)
    assert "ValueError at <string>" in lines[2]


def test_json_lines_when_read_then_have_stable_fields() -> None:
    first, _, failed, *again = [json.loads(line) for line in logged_hostile("json")]
    assert first.keys() == {"time", "level", "process", "pid", "logger", "message"}
    assert (first["level"], first["process"], first["logger"]) == ("warning", "tdserve", "tdserve.server")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", first["time"])
    assert failed.keys() == {*first, "request_id", "error", "exception"}
    assert (failed["request_id"], failed["error"]) == ("3-17\\n", "ValueError")
    assert [line["message"] for line in again] == [f"again {number}" for number in range(BURST)]


def test_repetition_when_an_interval_has_passed_then_the_next_line_has_how_many_were_left_out(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logs, "INTERVAL_S", 0.2)
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    level = root.level
    start_logging("info", process="tdserve")
    num_logged = 0
    shown = ""
    while "left out" not in shown:
        logging.getLogger("tdserve.server").info("again %d", num_logged)
        num_logged += 1
        shown += capfd.readouterr().err
    root.setLevel(level)
    lines = shown.splitlines()
    assert len(lines) == BURST + 1
    assert lines[-1].endswith(f"again {num_logged - 1} ({num_logged - 1 - BURST} more like it were left out before)")


@pytest.mark.parametrize(
    ("error", "level"),
    [
        (CorruptDataError(path="rows", expected="800 bytes", actual="10"), logging.ERROR),
        (LocalProtocolError(reason="a bug"), logging.ERROR),
        (InvalidRequestError(argument="a", reason="b"), logging.INFO),
        (StoreNotFoundError(name="s"), logging.DEBUG),
        (ServerBusyError(), logging.DEBUG),
    ],
)
def test_choose_failure_level_when_a_call_has_failed_then_damage_and_bugs_are_errors(
    error: TDServeError, level: int
) -> None:
    assert choose_failure_level(error) == level
