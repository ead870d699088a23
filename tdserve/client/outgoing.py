"""Content on its way to the server: a tensordict taken apart, laid out, and sent while the request is on its way."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tdserve.client.leaves import leaves_of
from tdserve.client.session import Session
from tdserve.client.value_blocks import encode_values
from tdserve.content import write_layout
from tdserve.layout import Layout
from tdserve.spec.capture import Captured
from tdserve.spec.tree import Path
from tdserve.transport.channel import Work
from tdserve.transport.ends import JoinedEnd, LeafEnd, Source
from tdserve.transport.pool import BufferPool
from tdserve.transport.stream import pack, send_messages, start_send
from tdserve.v1 import control_pb2

MAX_POSTED_BYTES = 32 * 1024 * 1024
"""Up to this size all messages are posted at once; above, a window keeps the staging memory small."""


class Outgoing:
    """The content of one write, ready to be sent any number of times (once per attempt).

    Args:
        captured: What is written.
        fingerprint: Of the store's structure, as this client knows it.
        inline_bytes: Content up to this size rides in the request.
        store: Name, for errors.
        is_packed: Whether it is a version of weights, laid out as its file.

    Raises:
        CapacityError: The non-tensor values are larger than a message may be. Nothing was sent.
    """

    def __init__(
        self, captured: Captured, *, fingerprint: bytes, inline_bytes: int, store: str, is_packed: bool = False
    ) -> None:
        layout = write_layout(captured.spec, is_packed=is_packed)
        values = encode_values(captured.spec, captured.values, store=store)
        self._take(layout, _leaf_end(captured, layout), values, fingerprint, inline_bytes)

    @classmethod
    def of(cls, captured: Sequence[Captured], *, fingerprint: bytes, inline_bytes: int, store: str) -> Outgoing:
        """The rows of several batches of one structure, one after the other; several may have no values."""
        if len(captured) == 1:
            return cls(captured[0], fingerprint=fingerprint, inline_bytes=inline_bytes, store=store)
        outgoing = cls.__new__(cls)
        layout = write_layout(captured[0].spec.with_rows(sum(each.spec.batch_size[0] for each in captured)))
        found = [_contents_of(each) for each in captured]
        pieces = [[each[slot.path] for each in found] for slot in layout.slots]  # larger leaves may stand elsewhere
        outgoing._take(layout, JoinedEnd(pieces), b"", fingerprint, inline_bytes)
        return outgoing

    def _take(self, layout: Layout, source: Source, values: bytes, fingerprint: bytes, inline_bytes: int) -> None:
        self._layout = layout
        self._source = source
        self.nbytes = sum(layout.message_nbytes)
        self.message = control_pb2.Content(fingerprint=fingerprint, nbytes=self.nbytes)
        self.message.values = values
        if self.nbytes <= inline_bytes:
            self.message.inline = pack(layout.messages, source)
        else:
            self.message.message_nbytes.extend(layout.message_nbytes)

    @property
    def is_inline(self) -> bool:
        """Whether the content rides in the request."""
        return self.message.HasField("inline")

    def post(self, session: Session, tag: int, pool: BufferPool) -> list[Work]:
        """Starts to send everything; the leaves must not change until the works are over."""
        if self.is_inline:
            return []
        return start_send(session.channel, tag, self._layout.messages, self._source, pool)

    def send(self, session: Session, tag: int, pool: BufferPool, timeout_s: float) -> None:
        """Sends everything, and returns when the server has taken it."""
        if self.is_inline:
            return
        if self.nbytes <= MAX_POSTED_BYTES:
            session.channel.wait_all(self.post(session, tag, pool), timeout_s)
        else:
            send_messages(session.channel, tag, self._layout.messages, self._source, pool=pool, timeout_s=timeout_s)


def _leaf_end(captured: Captured, layout: Layout) -> LeafEnd:
    leaves = leaves_of(captured, layout)
    if leaves.contents is None:
        return LeafEnd([tensor.cpu().contiguous() for tensor in leaves.tensors])
    return LeafEnd(leaves.tensors, contents=leaves.contents)


def _contents_of(captured: Captured) -> dict[Path, NDArray[np.uint8]]:
    layout = write_layout(captured.spec)
    return dict(zip((slot.path for slot in layout.slots), _leaf_end(captured, layout).contents, strict=True))
