"""Positions of a selection that are too many for a message: a file that every process of the server maps."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

from tdserve.base.errors import RemoteProtocolError, TDServeError
from tdserve.base.ids import new_uid
from tdserve.messages.selection.items import POSITION_BYTES
from tdserve.store.faults import os_faults
from tdserve.v1 import content_pb2

MAX_POSITIONS_BYTES = 1 << 30
"""Of one request: 128 million rows."""


class PositionsFile:
    """Takes what comes ahead of one request.

    Args:
        folder: Where the file is made.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / new_uid()
        self._nbytes = 0
        self._failure: TDServeError | None = None

    def add(self, content: bytes) -> None:
        """Appends the next part. Where the disk is full, ``place_positions`` says so.

        Raises:
            RemoteProtocolError: The parts are more than a request may have.
        """
        self._nbytes += len(content)
        if self._nbytes > MAX_POSITIONS_BYTES:
            expected = f"at most {MAX_POSITIONS_BYTES} bytes of positions"
            raise RemoteProtocolError(expected=expected, received=f"{self._nbytes} bytes")
        try:
            with os_faults(self._path, asked=len(content)), self._path.open("ab", buffering=0) as file:
                file.write(content)
        except TDServeError as error:
            self._failure = error

    def hand_to(self, selection: content_pb2.Selection) -> None:
        """As :func:`place_positions`, of a selection that names no file yet."""
        if self._failure is not None:
            raise self._failure
        offset = 0
        for item in selection.items:
            array = item.positions
            if array.is_ahead:
                array.file, array.offset = str(self._path), offset
                offset += POSITION_BYTES * math.prod(array.shape)
        if offset != self._nbytes:
            raise RemoteProtocolError(expected=f"{offset} bytes of positions", received=f"{self._nbytes}")

    async def remove(self) -> None:
        """Removes the file: in a thread, since the kernel takes milliseconds to get a hundred megabytes back."""
        await asyncio.to_thread(self._path.unlink, missing_ok=True)


def place_positions(selection: content_pb2.Selection, ahead: PositionsFile | None) -> None:
    """Tells the arrays of a selection that a client has sent where their data lies.

    Args:
        ahead: What has come before it.

    Raises:
        RemoteProtocolError: They have more data or less, or the client names a file of the server.
        CapacityError: The disk had no room for it.
    """
    if any(item.positions.file for item in selection.items):
        raise RemoteProtocolError(expected="positions", received="the name of a file")
    if ahead is not None:
        ahead.hand_to(selection)
