"""The log of a server's processes: one line per event on standard error, for people or as JSON.

What others can cause appears in it, so nothing that a terminal or a reader of lines would obey gets through, no line is
longer than ``MAX_LINE``, and what is repeated is left out and counted. Exceptions appear as their class and the places
in the code: their text may contain values. Only errors of tdserve and of the system, whose texts have none, appear
whole.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from threading import Lock
from traceback import extract_tb
from typing import Any

from tdserve.base.errors import KeyNotFoundError, StoreNotFoundError, TDServeError, VersionConflictError

LEVELS = ("debug", "info", "warning", "error")
"""Names of levels, from the most to the least detailed."""

LOG_FORMATS = ("human", "json")

_FORMAT_VARIABLE = "TDSERVE_LOG_FORMAT"

MAX_LINE = 4096
"""Characters of a message; names may be long, and there may be many in one."""

BURST = 20
"""Lines of one kind within ``INTERVAL_S``; the others are counted."""

INTERVAL_S = 10.0

MAX_KINDS = 1000
"""Kinds of lines whose repetition is counted: the texts in the code are fewer."""

MAX_PLACES = 12
"""Places in the code that are shown of an exception, the innermost ones."""


def start_logging(level: str, *, process: str, form: str = "human") -> None:
    """Starts logging to standard error; called once, by the main function of a process.

    Args:
        level: The lowest level that is logged, one of ``LEVELS``.
        process: Name of this process in each line, such as ``"tdserve worker 0"``.
        form: One of ``LOG_FORMATS``.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(_JsonLines(process) if form == "json" else _HumanLines(process))
    handler.addFilter(_Repetition())
    logging.basicConfig(level=level.upper(), handlers=[handler])


def choose_failure_level(error: TDServeError) -> int:
    """Returns the level at which a failed call is logged: damage and bugs are errors, and what a retry may mend, a look
    whether a store or a key is there, or a compare-and-set that another one has overtaken, are no events."""
    if error.code in ("DATA_LOSS", "INTERNAL"):
        return logging.ERROR
    is_quiet = error.retryable or isinstance(error, (StoreNotFoundError, KeyNotFoundError, VersionConflictError))
    return logging.DEBUG if is_quiet else logging.INFO


def pass_log_format(form: str) -> None:
    """Makes the processes that this one starts log in this form; they ask ``read_log_format``."""
    os.environ[_FORMAT_VARIABLE] = form


def read_log_format() -> str:
    """Returns the form in which a process that a server has started logs."""
    return "json" if os.environ.get(_FORMAT_VARIABLE) == "json" else "human"


def name_request(request_id: str) -> dict[str, str]:
    """Returns ``extra`` of a line about a request: the id that the client's error repeats."""
    return {"request_id": request_id}


def escape_line(text: str) -> str:
    """Returns a text on one line, with what is not printable escaped as Python does, and cut to ``MAX_LINE``."""
    if len(text) > MAX_LINE:
        text = f"{text[:MAX_LINE]}... ({len(text)} characters)"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def describe_exception(fault: BaseException) -> str:
    """Returns an exception on one line: its class, its text if that has no values, and the places in the code."""
    text = str(fault) if isinstance(fault, (TDServeError, OSError)) else ""
    places = [
        f"{os.path.basename(each.filename)}:{each.lineno} {each.name}" for each in extract_tb(fault.__traceback__)
    ]
    shown = f"{type(fault).__name__}{text and ': '}{text}"
    return f"{shown} at {' < '.join(reversed(places[-MAX_PLACES:]))}" if places else shown


class _Repetition(logging.Filter):
    """Leaves out lines of one kind beyond ``BURST`` in each interval; the next one has their number."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = Lock()
        self._kinds: dict[tuple[str, int, str], tuple[float, int]] = {}  # end of the interval, lines in it

    def filter(self, record: logging.LogRecord) -> bool:
        kind = record.name, record.levelno, str(record.msg)[:MAX_LINE]
        now_s = time.monotonic()
        with self._lock:
            end_s, num_lines = self._kinds.pop(kind, (now_s + INTERVAL_S, 0))
            if now_s >= end_s:
                record.num_left_out = getattr(record, "num_left_out", 0) + max(num_lines - BURST, 0)
                end_s, num_lines = now_s + INTERVAL_S, 0
            if len(self._kinds) >= MAX_KINDS:
                del self._kinds[next(iter(self._kinds))]
            self._kinds[kind] = end_s, num_lines + 1
        return num_lines < BURST


class _HumanLines(logging.Formatter):
    """``TIME LEVEL PROCESS: MESSAGE [request ID] | EXCEPTION (N more ... left out)``."""

    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)s {process}: %(line)s")

    def format(self, record: logging.LogRecord) -> str:
        record.line = " ".join(_list_parts(record))
        return self.formatMessage(_with_time(self, record))


def _with_time(formatter: logging.Formatter, record: logging.LogRecord) -> logging.LogRecord:
    record.asctime = formatter.formatTime(record)
    return record


def _list_parts(record: logging.LogRecord) -> Iterator[str]:
    yield escape_line(record.getMessage())
    if request_id := getattr(record, "request_id", ""):
        yield f"[request {escape_line(request_id)}]"
    if record.exc_info and record.exc_info[1] is not None:
        yield f"| {escape_line(describe_exception(record.exc_info[1]))}"
    if num_left_out := getattr(record, "num_left_out", 0):
        yield f"({num_left_out} more like it were left out before)"


class _JsonLines(logging.Formatter):
    """One JSON object per line, in ASCII; its fields are listed in the guide's page ``command-line``."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, timezone.utc)
        facts: dict[str, Any] = {
            "time": moment.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "pid": record.process,
            "logger": record.name,
            "message": escape_line(record.getMessage()),
        }
        if request_id := getattr(record, "request_id", ""):
            facts["request_id"] = escape_line(request_id)
        if record.exc_info and record.exc_info[1] is not None:
            facts["error"] = type(record.exc_info[1]).__name__
            facts["exception"] = escape_line(describe_exception(record.exc_info[1]))
        if num_left_out := getattr(record, "num_left_out", 0):
            facts["num_left_out"] = num_left_out
        return json.dumps(facts)


class SparseLog:
    """Logs warnings that strangers, or a full disk, can cause often: at most one line per interval, with the number of
    lines left out.

    Threads: one.

    Args:
        logger: The logger.
        interval_s: Seconds between two lines.
    """

    def __init__(self, logger: logging.Logger, *, interval_s: float = INTERVAL_S) -> None:
        self._logger = logger
        self._interval_s = interval_s
        self._next_s = 0.0
        self._num_left_out = 0

    def warn(self, message: str) -> None:
        """Logs a warning, or counts it."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            self._num_left_out += 1
            return
        self._logger.warning("%s", message, extra={"num_left_out": self._num_left_out})
        self._next_s, self._num_left_out = now_s + self._interval_s, 0
