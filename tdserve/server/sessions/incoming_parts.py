"""What comes of a client before its next request is whole: parts of it, and lists that it has no room for."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from google.protobuf.message import DecodeError

from tdserve.base.errors import RemoteProtocolError
from tdserve.control.parts import PartJoiner
from tdserve.server.admission_budget import AdmissionBudget
from tdserve.server.sessions.long_list_file import LongListFile
from tdserve.server.sessions.session import ClientSession
from tdserve.v1 import control_pb2


class IncomingParts:
    """Of all sessions.

    Args:
        folder: Where lists are put.
        held: Counts the memory of parts.
    """

    def __init__(self, folder: Path, held: AdmissionBudget) -> None:
        self._folder = folder
        self._held = held
        self._parts: defaultdict[int, PartJoiner] = defaultdict(PartJoiner)
        self._lists: dict[int, LongListFile] = {}

    def add(self, session: ClientSession, part: control_pb2.MessagePart) -> control_pb2.ClientMessage | None:
        """Takes the next part; returns the whole message with its last one. What is none ends the session."""
        parts = self._parts[session.number]
        nbytes = parts.nbytes
        try:
            if part.is_ahead:
                self._lists_of(session).add(part.content)
            elif (whole := parts.add(part)) is not None:
                return control_pb2.ClientMessage.FromString(whole)
        except (RemoteProtocolError, DecodeError):
            session.ended.set()
        finally:
            self._held.count(session, parts.nbytes - nbytes)
        return None

    def take_lists(self, session: ClientSession) -> LongListFile | None:
        """What has come ahead of the request that is whole now; the caller removes it."""
        return self._lists.pop(session.number, None)

    async def forget(self, session: ClientSession) -> None:
        """A session has ended in the middle of a message."""
        parts = self._parts.pop(session.number, None)
        if parts is not None:
            self._held.count(session, -parts.nbytes)
        lists = self.take_lists(session)
        if lists is not None:
            await lists.remove()

    def _lists_of(self, session: ClientSession) -> LongListFile:
        found = self._lists.get(session.number)
        if found is None:
            found = self._lists[session.number] = LongListFile(self._folder)
        return found
