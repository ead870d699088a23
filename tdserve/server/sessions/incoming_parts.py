"""Incomplete messages of clients: parts of a request, and long lists that arrive ahead of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from google.protobuf.message import DecodeError

from tdserve.base.errors import RemoteProtocolError, ServerBusyError, TooLargeError
from tdserve.control.parsed_size import estimate_parsed_nbytes
from tdserve.control.parts import PartJoiner
from tdserve.server.execution.admission_budget import AdmissionBudget
from tdserve.server.sessions.client_session import ClientSession
from tdserve.server.sessions.long_list_file import LongListFile
from tdserve.v1 import control_pb2

WHAT = "a message in parts"

MAX_INCOMPLETE = 4
"""Most incomplete messages of one session. A client sends them one after the other, over the stream or locally; while
it changes from the one to the other, those of both may be on their way."""


@dataclass
class _Incomplete:
    """What has arrived of one message.

    Attributes:
        parts: Its parts so far.
        lists: Its long lists, which arrive first; None if it has none, or they were taken.
    """

    parts: PartJoiner = field(default_factory=PartJoiner)
    lists: LongListFile | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing of it is here, and nothing is to come."""
        return self.lists is None and not self.parts.nbytes and not self.parts.is_dropping


class IncomingParts:
    """The incomplete messages of all sessions, by their numbers: other requests arrive between the parts of one.

    Args:
        folder: Folder for files of long lists.
        held: Counts the memory that the parts take.
    """

    def __init__(self, folder: Path, held: AdmissionBudget) -> None:
        self._folder = folder
        self._held = held
        self._incomplete: dict[int, dict[int, _Incomplete]] = {}

    def add(
        self, session: ClientSession, request: int, part: control_pb2.MessagePart
    ) -> control_pb2.ClientMessage | None:
        """Adds the next part; returns the message if this was its last part. An invalid part ends the session.

        Args:
            request: Number of the request that it is a part of.

        Raises:
            ServerBusyError: There is no memory for the message now. The rest of it will be dropped.
            TooLargeError: There never is.
        """
        of_session = self._incomplete.setdefault(session.number, {})
        if request not in of_session and len(of_session) >= MAX_INCOMPLETE:
            session.ended.set()
            return None
        found = of_session.setdefault(request, _Incomplete())
        parts, nbytes = found.parts, found.parts.nbytes
        try:
            if part.is_ahead:
                self._add_to_list(found, part.content)
                return None
            if not parts.is_dropping:
                self._held.admit(session, WHAT, len(part.content))
            if (whole := parts.add(part)) is not None:
                return self._parse(session, whole)
        except (ServerBusyError, TooLargeError):
            if not part.is_last:
                parts.drop()
            if (lists := self.take_lists(session, request)) is not None:
                session.run(lists.remove(), 0)
            raise
        except (RemoteProtocolError, DecodeError):
            session.ended.set()
        finally:
            self._held.count(session, parts.nbytes - nbytes)
            if found.is_over:
                of_session.pop(request, None)
        return None

    def _add_to_list(self, found: _Incomplete, content: bytes) -> None:
        if found.lists is None:
            found.lists = LongListFile(self._folder)
        found.lists.add(content)

    def _parse(self, session: ClientSession, whole: bytes) -> control_pb2.ClientMessage:
        """Returns the message, if there is memory for what becomes of its fields.

        Raises:
            RemoteProtocolError: It is a part itself: each level of such a nesting would keep a copy of the rest.
        """
        self._held.admit(session, WHAT, estimate_parsed_nbytes(whole))
        message = control_pb2.ClientMessage.FromString(whole)
        if message.HasField("part"):
            raise RemoteProtocolError(expected="a whole message", received="a part")
        return message

    def take_lists(self, session: ClientSession, request: int) -> LongListFile | None:
        """Removes and returns the lists that arrived ahead of a request; the caller deletes their file."""
        of_session = self._incomplete.get(session.number, {})
        found = of_session.get(request)
        if found is None:
            return None
        lists, found.lists = found.lists, None
        if found.is_over:
            del of_session[request]
        return lists

    async def forget(self, session: ClientSession) -> None:
        """Drops what has arrived of messages when their session ends."""
        for found in self._incomplete.pop(session.number, {}).values():
            self._held.count(session, -found.parts.nbytes)
            if found.lists is not None:
                await found.lists.remove()
