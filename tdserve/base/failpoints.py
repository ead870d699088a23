"""Named failpoints: steps at which tests end this process, or have a call fail as on a full disk.

The environment variable ``TDSERVE_FAILPOINT`` switches one on. Its value is ``NAME``, ``NAME:COUNT`` for the time that
the process gets there for the COUNT-th time, or ``NAME=ERROR``, such as ``commit.recorded:2`` or ``files.made=ENOSPC``.
Without an error the process gets SIGKILL. With ``@PATH`` the value is read from that file at each step, if the file
exists; the file is removed when the failpoint strikes, so that it strikes once however many processes see it.

Without the variable a failpoint costs the call of a function that compares with None: 30 ns.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from typing import NamedTuple

from tdserve.base.errors import InvalidRequestError

VARIABLE = "TDSERVE_FAILPOINT"


class Failpoint(NamedTuple):
    """One row of the table of failpoints.

    Attributes:
        process: The process that gets there: ``control``, ``worker``, ``writer`` (a data worker or a local client,
            whichever fills the rows), or ``client``.
        step: What has just been done.
        then: What must hold after the process was killed there.
        fails: Whether a call may fail there for lack of room.
    """

    process: str
    step: str
    then: str
    fails: bool = False


FREE = "The name is free, and no file is left."
THERE = "The store is there, whole."
OLD = "The content is the old one, whole."
NEW = "The content is the new one, whole."
SERVES = "There is no new checkpoint; the next attempt succeeds."
STAYS = "The store is where it was, whole."
MOVED = "The store is at the other server, whole."
AGAIN = "The rows are first in line again."

FAILPOINTS: dict[str, Failpoint] = {
    # ---- creation and deletion
    "creation.begun": Failpoint("control", "A name is on record for a store that has no files.", FREE),
    "files.made": Failpoint("control", "Some files of a store are made.", FREE, fails=True),
    "creation.filled": Failpoint("control", "All files of a store are made; it is not visible.", FREE),
    "creation.recorded": Failpoint("control", "A store is on record as visible.", THERE),
    "creation.packed": Failpoint("control", "A small store is on record together with its content.", THERE),
    "filling.received": Failpoint("control", "The first content of a store is in its files.", FREE),
    "filling.recorded": Failpoint("control", "A store with its first content is on record as visible.", THERE),
    "deletion.recorded": Failpoint("control", "A store is on record as deleted.", FREE),
    "deletion.moved": Failpoint("control", "The files of a deleted store are in a place that is not read.", FREE),
    # ---- the catalog
    "catalog.written": Failpoint("control", "All changes are in a transaction, which is not committed.", OLD, True),
    # ---- the commit of rows
    "extend.reserved": Failpoint("control", "Rows are reserved for an extend.", OLD),
    "extend.filled": Failpoint("control", "The rows of an extend have their content.", OLD),
    "commit.recorded": Failpoint("control", "Rows are on record as committed; readers do not see them.", NEW),
    "commit.shown": Failpoint("control", "Readers see the rows; the answer is not sent.", NEW),
    "long-commit.recorded": Failpoint("control", "A long extend is on record as committed.", NEW),
    "long-commit.part-shown": Failpoint("control", "Readers see a part of the rows of a long extend.", NEW),
    # ---- overwrites
    "overwrite.staged": Failpoint("control", "The content of an overwrite is in a staging file.", OLD),
    "overwrite.journalled": Failpoint("control", "An overwrite is in the journal.", NEW),
    "values.stored": Failpoint("worker", "The values of an overwrite are stored, and no tensors.", NEW),
    "overwrite.part-applied": Failpoint("worker", "Some tensors of an overwrite are in place.", NEW),
    "overwrite.applied": Failpoint("control", "The content is in place; readers do not see it.", NEW),
    "overwrite.answered": Failpoint("control", "The answer has replaced the journal entry.", NEW),
    "in-place.recorded": Failpoint(
        "control", "It is on record which rows a local client will overwrite.", "The content is the old or the new one."
    ),
    "in-place.answered": Failpoint("control", "The answer to a local overwrite is on record.", NEW),
    # ---- changes of keys
    "alteration.received": Failpoint("control", "The content of new keys is in a folder of its own.", OLD),
    "alteration.prepared": Failpoint("control", "The files of the new structure wait under second names.", OLD),
    "alteration.recorded": Failpoint("control", "The new structure is on record; files have their old names.", NEW),
    "alteration.part-moved": Failpoint("control", "Some files have the names of the new structure.", NEW, fails=True),
    "alteration.moved": Failpoint("control", "All files have the names of the new structure.", NEW),
    "alteration.shown": Failpoint("control", "Readers see the new structure; it is on record as unfinished.", NEW),
    "leaves.recorded": Failpoint("control", "New leaves of a table are on record; readers do not see them.", NEW),
    "leaves.shown": Failpoint("control", "Readers see the new leaves; they are on record as unfinished.", NEW),
    # ---- published versions
    "version.made": Failpoint("writer", "The file of a version is made, and empty.", OLD, fails=True),
    "version.filled": Failpoint("writer", "The file of a version has its content, and is not sealed.", OLD),
    "publish.received": Failpoint("control", "The file of a version is sealed.", OLD),
    "publish.numbered": Failpoint("control", "The file of a version has its number, which is not on record.", OLD),
    "publish.recorded": Failpoint("control", "A version is on record as published.", NEW),
    # ---- checkpoints
    "checkpoint.resting": Failpoint("control", "All stores rest.", SERVES),
    "checkpoint.kept": Failpoint("control", "What had changed is copied apart; the stores serve again.", SERVES),
    "archive.written": Failpoint("client", "A file of the place has its content under another name.", SERVES, True),
    "checkpoint.read": Failpoint("client", "All blocks of a checkpoint are at its place, but no manifest.", SERVES),
    # ---- claims
    "claim.granted": Failpoint("control", "A claim is on record; the answer that grants it is not sent.", NEW),
    "claim.taken": Failpoint("writer", "A writer has claimed rows.", OLD),
    "claim.filled": Failpoint("writer", "Claimed rows have their content.", OLD),
    "claim.written": Failpoint("writer", "Claimed rows are recorded in the claim file.", NEW),
    "claim.found": Failpoint("control", "Records of a claim file were read; their rows are not committed.", NEW),
    "claim.committed": Failpoint("control", "Claimed rows are committed; the claim file has their records.", NEW),
    # ---- keyed stores
    "put.changed": Failpoint("worker", "Entries and answer are in a transaction, which is not committed.", OLD, True),
    "put.committed": Failpoint("worker", "Entries and answer are committed.", NEW),
    "put.reported": Failpoint("control", "Entries are committed; control has not recorded the answer.", NEW),
    # ---- changes of tables and queues
    "lease.drawn": Failpoint("control", "Rows of a queue are on lease; they are not sent.", AGAIN),
    "change.recorded": Failpoint("control", "It is on record that rows leave, with the answer; they are there.", NEW),
    "change.applied": Failpoint("control", "Acknowledged or deleted rows have left; the answer is not sent.", NEW),
    # ---- moves
    "move.sealed": Failpoint("control", "The source has sealed a store.", STAYS),
    "move.written": Failpoint("control", "The target has written blocks of a store.", STAYS, fails=True),
    "move.completed": Failpoint("control", "The target has all of a store, and keeps it.", STAYS),
    "move.released": Failpoint("control", "The source has on record that the store is at the target.", MOVED),
    "move.handed-over": Failpoint("client", "The source has released a store that the target does not show.", MOVED),
    "move.recorded": Failpoint("control", "The target has the store on record; its files lie apart.", MOVED),
    "move.shown": Failpoint("control", "The target shows the store; what had come is on record, too.", MOVED),
    # ---- recovery, of which each step may be cut short by another crash
    "recovery.catalog-read": Failpoint("control", "A restarted server has read the catalog.", NEW),
    "recovery.keys-finished": Failpoint("control", "It has finished the changes of keys.", NEW),
    "recovery.writes-finished": Failpoint("control", "It has finished the overwrites of the journal.", NEW),
}
"""All failpoints by name. A test kills at each, and checks what must hold then."""


class _Strike(NamedTuple):
    name: str
    nth: int
    error: int

    @classmethod
    def parse(cls, text: str) -> _Strike:
        at, _, error = text.strip().partition("=")
        name, _, count = at.partition(":")
        is_number = count.isdigit() and int(count) > 0
        is_error = not error or isinstance(getattr(errno, error, None), int)
        if name not in FAILPOINTS or (":" in at and not is_number) or not is_error:
            reason = f"{text!r} is not NAME, NAME:COUNT or NAME=ERROR with a name of tdserve.base.failpoints"
            raise InvalidRequestError(argument=VARIABLE, reason=reason)
        return cls(name, int(count or 1), getattr(errno, error) if error else 0)

    def strike(self) -> None:
        if not self.error:
            os.kill(os.getpid(), signal.SIGKILL)
            signal.pause()  # another thread may get the signal: this one goes no further
        fault = OSError(self.error, os.strerror(self.error))
        raise fault


class _Armed:
    """The failpoint that is switched on, and how often this process got there."""

    def __init__(self, setting: str) -> None:
        self._path = setting[1:] if setting.startswith("@") else ""
        self._strike = None if self._path else _Strike.parse(setting)
        self._num_reached = 0

    def reach(self, name: str) -> None:
        strike = self._strike or self._read()
        if strike is None or name != strike.name:
            return
        self._num_reached += 1
        if self._num_reached == strike.nth and self._take():
            strike.strike()

    def _read(self) -> _Strike | None:
        try:
            with open(self._path, encoding="utf-8") as file:
                return _Strike.parse(file.read())
        except FileNotFoundError:
            self._num_reached = 0
            return None

    def _take(self) -> bool:
        """Removes the file, if there is one; returns whether no other process was faster."""
        try:
            if self._path:
                os.unlink(self._path)
        except FileNotFoundError:
            return False
        return True


def arm(setting: str | None = None) -> None:
    """Switches on the failpoint that a setting names; ``None``: that of the environment variable.

    Raises:
        InvalidRequestError: There is no such failpoint.
    """
    global on_reach  # noqa: PLW0603 (a process has one)
    setting = os.environ.get(VARIABLE, "") if setting is None else setting
    on_reach = _Armed(setting).reach if setting else None


on_reach: Callable[[str], None] | None = None
"""Called with the name of each failpoint that this process reaches. None, unless the environment variable is set; a
simulation sets a function of its own."""


def reach(name: str) -> None:
    """Marks a step; ``name`` is one of ``FAILPOINTS``. Does nothing unless a failpoint is switched on.

    Raises:
        OSError: The failpoint that is switched on is to fail.
    """
    if on_reach is not None:
        on_reach(name)


arm()
