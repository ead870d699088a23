"""The calls of clients and their outcomes, written to disk line by line, so that they survive the client."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class Recorder:
    """Appends events to a file; a context manager, which closes it. What was written survives ``kill -9`` of the
    process. Threads: one.

    Args:
        path: Path of the file, which is created if it does not exist.
    """

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, event: str, **fields: Any) -> None:
        """Appends an event: ``call`` before a call, ``ok`` or ``failed`` after it, ``saw`` for what was read. Each has
        its time, seconds since the epoch, so that calls of several processes can be put in order."""
        content = {"event": event, "at_s": round(time.time(), 4), **fields}
        os.write(self._fd, (json.dumps(content) + "\n").encode())

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


@dataclass
class Call:
    """A call of one client and its outcome.

    Attributes:
        fields: The arguments.
        answer: The answer; None if there was none, or a failure.
        failure: The error, as ``"Class: message"``.
        begun_s, ended_s: When it began and when its outcome was known, seconds since the epoch; 0.0: unknown.
    """

    fields: dict[str, Any]
    answer: dict[str, Any] | None = None
    failure: str | None = None
    begun_s: float = 0.0
    ended_s: float = 0.0

    @property
    def is_acknowledged(self) -> bool:
        """Whether the client received a successful answer."""
        return self.answer is not None


@dataclass
class History:
    """The calls and observations of one thread of one client, in order."""

    path: Path
    calls: list[Call] = field(default_factory=list)
    sights: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    """Each observation, with the number of calls before it."""

    @classmethod
    def read(cls, path: Path) -> History:
        """Reads the history in a file, without a last line that was cut short."""
        history = cls(path)
        for event in _events(path):
            kind, at_s = event.pop("event"), event.pop("at_s")
            if kind == "call":
                history.calls.append(Call(event, begun_s=at_s))
            elif kind == "saw":
                history.sights.append((len(history.calls), event))
            else:
                history.calls[-1].ended_s = at_s
                history.calls[-1].answer = event if kind == "ok" else None
                history.calls[-1].failure = event["error"] if kind == "failed" else None
        return history


def _events(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            yield json.loads(line)


def read_histories(folder: Path, role: str) -> list[History]:
    """Reads the histories of a role, those of earlier clients first."""
    return [History.read(path) for path in sorted(folder.glob(f"{role}-*.jsonl"))]
