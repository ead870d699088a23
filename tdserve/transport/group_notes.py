"""Short messages between members of an epoch, of any length: a page first, the rest behind it if it is longer."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch

from tdserve.base.errors import RemoteProtocolError
from tdserve.transport.group_content import Wire
from tdserve.transport.group_gloo import LinkWork

PAGE_BYTES = 512
"""What a call says of itself fits, but for structures; those are told once."""

MAX_NOTE_BYTES = 256 * 1024 * 1024
"""As of gRPC's messages: specs of a hundred thousand leaves fit."""

_LENGTH = struct.Struct("<Q")
_ROOM_BYTES = PAGE_BYTES - _LENGTH.size


def post_note(wire: Wire, content: bytes, peers: Sequence[int]) -> list[LinkWork]:
    """Starts to send a note to each of some ranks."""
    page = bytearray(PAGE_BYTES)
    _LENGTH.pack_into(page, 0, len(content))
    page[_LENGTH.size : _LENGTH.size + min(len(content), _ROOM_BYTES)] = content[:_ROOM_BYTES]
    buffers = [torch.frombuffer(page, dtype=torch.uint8)]
    if len(content) > _ROOM_BYTES:
        buffers.append(torch.frombuffer(bytearray(content[_ROOM_BYTES:]), dtype=torch.uint8))
    return [wire.post(buffer, peer) for peer in peers for buffer in buffers]


def recv_notes(wire: Wire, peers: Sequence[int], sent: Sequence[LinkWork] = ()) -> list[bytes]:
    """The next note of each of some ranks, in their order.

    Args:
        sent: Notes on their way, waited for too.

    Raises:
        PeerLostError, DeadlineExceededError: The link is closed.
        RemoteProtocolError: What came is no note.
    """
    pages = [torch.empty(PAGE_BYTES, dtype=torch.uint8) for _ in peers]
    wire.wait([*(wire.expect(page, peer) for page, peer in zip(pages, peers, strict=True)), *sent])
    notes, works = [], []
    for page, peer in zip(pages, peers, strict=True):
        content = page.numpy().tobytes()
        (nbytes,) = _LENGTH.unpack_from(content)
        if nbytes > MAX_NOTE_BYTES:
            raise RemoteProtocolError(expected=f"a note of at most {MAX_NOTE_BYTES} bytes", received=f"{nbytes}")
        rest = torch.empty(max(nbytes - _ROOM_BYTES, 0), dtype=torch.uint8)
        if nbytes > _ROOM_BYTES:
            works.append(wire.expect(rest, peer))
        notes.append((content[_LENGTH.size : _LENGTH.size + min(nbytes, _ROOM_BYTES)], rest))
    wire.wait(works)
    return [head + rest.numpy().tobytes() for head, rest in notes]
