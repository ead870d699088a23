"""Lists that are too long for a message, in a file that every process of the server can read."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

from tdserve.base.errors import RemoteProtocolError, TDServeError
from tdserve.base.ids import make_uid
from tdserve.messages.long_lists import LongList, find_lists
from tdserve.store.disk.faults import convert_os_errors
from tdserve.v1 import control_pb2

MAX_LISTS_BYTES = 1 << 30
"""Largest total size of the lists of one request: 128 million rows."""


class LongListFile:
    """The long lists that arrive ahead of one request.

    Args:
        folder: Folder in which the file is made.

    Attributes:
        nbytes: Size of the lists so far.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / make_uid()
        self.nbytes = 0
        self._failure: TDServeError | None = None

    def add(self, content: bytes) -> None:
        """Appends the next part. If the disk is full, ``hand_to`` raises the error.

        Raises:
            RemoteProtocolError: The parts exceed what a request may have.
        """
        self.nbytes += len(content)
        if self.nbytes > MAX_LISTS_BYTES:
            expected = f"at most {MAX_LISTS_BYTES} bytes of lists"
            raise RemoteProtocolError(expected=expected, received=f"{self.nbytes} bytes")
        try:
            with convert_os_errors(self._path, asked=len(content)), self._path.open("ab") as file:
                file.write(content)
        except TDServeError as error:
            self._failure = error

    def hand_to(self, lists: Iterable[LongList]) -> None:
        """Sets the file and the offset of each list.

        Raises:
            CapacityError: The disk had no room for the lists.
        """
        if self._failure is not None:
            raise self._failure
        offset = 0
        for each in lists:
            if each.nbytes_ahead:
                each.file, each.offset = str(self._path), offset
                offset += each.nbytes_ahead

    async def remove(self) -> None:
        """Removes the file, in a thread: the kernel takes milliseconds to free a hundred megabytes."""
        await asyncio.to_thread(self._path.unlink, missing_ok=True)


def place_lists(message: control_pb2.ClientMessage, ahead: LongListFile | None) -> None:
    """Sets the file and the offset of each list of a request that arrived ahead of it.

    Args:
        ahead: The lists that arrived ahead; None if there are none.

    Raises:
        RemoteProtocolError: The sizes differ, or the client names a file of the server.
        CapacityError: The disk had no room for the lists.
    """
    lists = find_lists(message)
    if not lists and ahead is None:
        return
    if any(each.file for each in lists):
        raise RemoteProtocolError(expected="a list", received="the name of a file")
    expected, received = sum(each.nbytes_ahead for each in lists), 0 if ahead is None else ahead.nbytes
    if expected != received:
        raise RemoteProtocolError(expected=f"{expected} bytes of lists", received=f"{received}")
    if ahead is not None:
        ahead.hand_to(lists)
