"""The content of one write, ready to be sent or put in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tdserve.client.content.value_blocks import encode_parts
from tdserve.client.session.content_channel import ContentChannel
from tdserve.client.session.pending import OnGranted
from tdserve.messages.selection.selection import Selection
from tdserve.structure.capture import Captured
from tdserve.structure.tree import Spec
from tdserve.transport.channel import Work
from tdserve.transport.pool import BufferPool
from tdserve.v1 import control_pb2

_EVERYTHING = Selection()


@dataclass(frozen=True)
class WriteTarget:
    """Where a write goes.

    Attributes:
        store: Name.
        fingerprint: Of the structure that the request names: of one row for a replay, of the content for a version.
        stored: The store's whole structure; None for a version, which is a file of its own.
        selection: What is replaced, where rows are that are there already.
        is_packed: Whether it is a version of weights, laid out as its file.
        allow_pickle: Whether non-tensor values of any type may go there.
    """

    store: str
    fingerprint: bytes
    stored: Spec | None = None
    selection: Selection = _EVERYTHING
    is_packed: bool = False
    allow_pickle: bool = False

    @property
    def is_extend(self) -> bool:
        """Whether it is new rows of a table."""
        return self.stored is not None and self.fingerprint != self.stored.fingerprint  # that of one row


class Outgoing:
    """The content of one write over one session, for each attempt another (``Mover.prepare``).

    Args:
        captured: What is written: one tensordict, or the rows of several of one structure, one after the other; several
            may have no values.
        target: Where it goes.
        is_bundled: Whether the values of each row become one bundle.

    Attributes:
        spec: The structure of the first that is written.
        content_nbytes: Of everything that is written.
        message: What the request says of the content.
        nbytes: Of what is sent behind the request.
        is_inline: Whether nothing is sent behind the request.
        free: To be called when the server is through with the request.

    Raises:
        TooLargeError: The non-tensor values are larger than a message may be. Nothing was sent.
        NotSupportedError: One of them cannot travel; names its key. Nothing was sent.
    """

    nbytes = 0
    is_inline = True
    free: Callable[[], None] | None = None

    def __init__(self, captured: Sequence[Captured], target: WriteTarget, *, is_bundled: bool = False) -> None:
        self._captured = captured
        self._target = target
        self.spec = captured[0].spec
        self._values = encode_parts(
            self.spec,
            [each.values for each in captured],
            store=target.store,
            allow_pickle=target.allow_pickle,
            is_bundled=is_bundled,
        )
        self.content_nbytes = sum(each.spec.nbytes for each in captured) + sum(map(len, self._values))
        self.message = control_pb2.Content(fingerprint=target.fingerprint, is_bundled=is_bundled)

    @property
    def place(self) -> OnGranted | None:
        """Writes the content where the server lets it, in the thread that brings the grant; None where it is sent."""
        return None

    def settle(self) -> None:
        """Takes the content that was only announced.

        Raises:
            TransferAbortedError: It has another structure by now: what the server waits for will never come.
            Others: As of whoever fetches it; the same.
        """

    def post(self, content: ContentChannel | None, tag: int, pool: BufferPool) -> list[Work]:
        """Starts to send what goes behind the request; the leaves must not change until the works are over."""
        return []

    def send(self, content: ContentChannel | None, tag: int, pool: BufferPool, timeout_s: float) -> list[Work]:
        """Sends everything. What is small is only posted: whether the server takes it, its answer tells, and that one
        can wait for without harm to the channel."""
        return self.post(content, tag, pool)
