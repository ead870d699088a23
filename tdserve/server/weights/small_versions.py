"""The content of small versions that were read, kept in control: the next reader's answer needs no data worker."""

from __future__ import annotations

from tdserve.v1 import control_pb2

MAX_ANSWER_NBYTES = 64 * 1024
"""Content and non-tensor values of a version that is kept."""

MAX_KEPT_NBYTES = 4 * 1024 * 1024
"""Those of all versions that are kept."""

Key = tuple[str, int, int]
"""Incarnation of the store, number of the version, and the dtype to which it was converted, or 0. A version never
changes, so its content stays right as long as a client may ask for it."""


class SmallVersions:
    """The versions that were read last."""

    def __init__(self) -> None:
        self._kept: dict[Key, tuple[bytes, bytes]] = {}
        self._nbytes = 0

    def find(self, key: Key) -> tuple[bytes, bytes] | None:
        """Returns content and non-tensor values of a version, if they are kept."""
        found = self._kept.pop(key, None)
        if found is not None:
            self._kept[key] = found
        return found

    def keep(self, key: Key, done: control_pb2.Done) -> None:
        """Keeps the content of an answer, if it is small; drops those that were used longest ago."""
        content, values = done.inline, done.accepted.values
        nbytes = len(content) + len(values)
        if nbytes > MAX_ANSWER_NBYTES or key in self._kept:
            return
        self._kept[key] = content, values
        self._nbytes += nbytes
        while self._nbytes > MAX_KEPT_NBYTES:
            self._nbytes -= sum(map(len, self._kept.pop(next(iter(self._kept)))))
