"""Incomplete messages of clients: parts of a request, and long lists that arrive ahead of it."""

from __future__ import annotations

from collections import defaultdict
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


class IncomingParts:
    """The incomplete messages of all sessions.

    Args:
        folder: Folder for files of long lists.
        held: Counts the memory that the parts take.
    """

    def __init__(self, folder: Path, held: AdmissionBudget) -> None:
        self._folder = folder
        self._held = held
        self._parts: defaultdict[int, PartJoiner] = defaultdict(PartJoiner)
        self._lists: dict[int, LongListFile] = {}

    def add(self, session: ClientSession, part: control_pb2.MessagePart) -> control_pb2.ClientMessage | None:
        """Adds the next part; returns the message if this was its last part. An invalid part ends the session.

        Raises:
            ServerBusyError: There is no memory for the message now. The rest of it will be dropped.
            TooLargeError: There never is.
        """
        parts = self._parts[session.number]
        nbytes = parts.nbytes
        try:
            if part.is_ahead:
                self._get_lists(session).add(part.content)
                return None
            if not parts.is_dropping:
                self._held.admit(session, WHAT, len(part.content))
            if (whole := parts.add(part)) is not None:
                return self._parse(session, whole)
        except (ServerBusyError, TooLargeError):
            if not part.is_last:
                parts.drop()
            if (lists := self.take_lists(session)) is not None:
                session.run(lists.remove(), 0)
            raise
        except (RemoteProtocolError, DecodeError):
            session.ended.set()
        finally:
            self._held.count(session, parts.nbytes - nbytes)
        return None

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

    def take_lists(self, session: ClientSession) -> LongListFile | None:
        """Removes and returns the lists that arrived ahead of a complete request; the caller deletes their file."""
        return self._lists.pop(session.number, None)

    async def forget(self, session: ClientSession) -> None:
        """Drops what has arrived of a message when its session ends."""
        parts = self._parts.pop(session.number, None)
        if parts is not None:
            self._held.count(session, -parts.nbytes)
        lists = self.take_lists(session)
        if lists is not None:
            await lists.remove()

    def _get_lists(self, session: ClientSession) -> LongListFile:
        found = self._lists.get(session.number)
        if found is None:
            found = self._lists[session.number] = LongListFile(self._folder)
        return found
