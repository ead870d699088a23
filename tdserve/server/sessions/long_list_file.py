"""Lists that are too long for a message: a file that every process of the server reads."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

from tdserve.base.errors import RemoteProtocolError, TDServeError
from tdserve.base.ids import new_uid
from tdserve.messages.long_lists import LongList, lists_in
from tdserve.store.faults import os_faults
from tdserve.v1 import control_pb2

MAX_LISTS_BYTES = 1 << 30
"""Of one request: 128 million rows."""


class LongListFile:
    """Takes what comes ahead of one request.

    Args:
        folder: Where the file is made.

    Attributes:
        nbytes: Of what has come so far.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / new_uid()
        self.nbytes = 0
        self._failure: TDServeError | None = None

    def add(self, content: bytes) -> None:
        """Appends the next part. Where the disk is full, ``place_lists`` says so.

        Raises:
            RemoteProtocolError: The parts are more than a request may have.
        """
        self.nbytes += len(content)
        if self.nbytes > MAX_LISTS_BYTES:
            expected = f"at most {MAX_LISTS_BYTES} bytes of lists"
            raise RemoteProtocolError(expected=expected, received=f"{self.nbytes} bytes")
        try:
            with os_faults(self._path, asked=len(content)), self._path.open("ab", buffering=0) as file:
                file.write(content)
        except TDServeError as error:
            self._failure = error

    def hand_to(self, lists: Iterable[LongList]) -> None:
        """Tells lists where their data lies.

        Raises:
            CapacityError: The disk had no room for it.
        """
        if self._failure is not None:
            raise self._failure
        offset = 0
        for each in lists:
            if each.nbytes_ahead:
                each.file, each.offset = str(self._path), offset
                offset += each.nbytes_ahead

    async def remove(self) -> None:
        """Removes the file: in a thread, since the kernel takes milliseconds to get a hundred megabytes back."""
        await asyncio.to_thread(self._path.unlink, missing_ok=True)


def place_lists(message: control_pb2.ClientMessage, ahead: LongListFile | None) -> None:
    """Tells the lists of a request where their data lies.

    Args:
        ahead: What has come before it.

    Raises:
        RemoteProtocolError: They have more data or less, or the client names a file of the server.
        CapacityError: The disk had no room for it.
    """
    lists = lists_in(message)
    if any(each.file for each in lists):
        raise RemoteProtocolError(expected="a list", received="the name of a file")
    expected, received = sum(each.nbytes_ahead for each in lists), 0 if ahead is None else ahead.nbytes
    if expected != received:
        raise RemoteProtocolError(expected=f"{expected} bytes of lists", received=f"{received}")
    if ahead is not None:
        ahead.hand_to(lists)
