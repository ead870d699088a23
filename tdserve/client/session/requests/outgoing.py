"""The content of one write, ready to be sent or written in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tdserve.client.content.value_blocks import encode_parts, may_bundle
from tdserve.client.session.channels.content_channel import ContentChannel
from tdserve.client.session.requests.pending import OnPermit
from tdserve.messages.selection.selection import EVERYTHING, Selection
from tdserve.structure.captures.capture import Captured
from tdserve.structure.trees.tree import Spec
from tdserve.transport.channel import Work
from tdserve.transport.pool import BufferPool
from tdserve.v1 import control_pb2


@dataclass(frozen=True)
class WriteTarget:
    """The destination of a write.

    Attributes:
        store: Name.
        fingerprint: Fingerprint of the structure that the request names: of one row for a replay, of the content for a
            version.
        stored: The store's whole structure; None for a version, which is a file of its own.
        selection: Which existing rows are replaced.
        is_packed: Whether it is a version of weights, laid out like its file.
        allow_pickle: Whether non-tensor values of any type may be written.
        is_new: Whether the request creates the store.
    """

    store: str
    fingerprint: bytes
    stored: Spec | None = None
    selection: Selection = EVERYTHING
    is_packed: bool = False
    allow_pickle: bool = False
    is_new: bool = False

    @property
    def is_extend(self) -> bool:
        """Whether new rows are added to a table."""
        return self.stored is not None and self.fingerprint != self.stored.fingerprint  # that of one row


class Outgoing:
    """The content of one write over one session; each attempt makes a new one (``ClientMover.prepare``).

    Args:
        captured: The content: one tensordict, or rows of several tensordicts of one structure, in order; these have no
            values if there are several.
        target: The destination.

    Attributes:
        spec: Structure of the first tensordict.
        content_nbytes: Size of all content.
        message: Description of the content in the request.
        nbytes: Size of what is sent after the request.
        is_inline: Whether nothing is sent after the request.
        free: Called when the server has finished the request.

    Raises:
        TooLargeError: The non-tensor values are larger than a message may be. Nothing was sent.
        NotSupportedError: One of them cannot be sent; the error names its key. Nothing was sent.
    """

    nbytes = 0
    is_inline = True
    free: Callable[[], None] | None = None

    def __init__(self, captured: Sequence[Captured], target: WriteTarget) -> None:
        self._captured = captured
        self._target = target
        self.spec = captured[0].spec
        stored = target.stored
        is_bundled = stored is not None and target.is_extend and may_bundle(self.spec, stored)
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
    def on_permit(self) -> OnPermit | None:
        """Returns what writes the content in place, called in the thread that receives the permit.

        None if the content is sent.
        """
        return None

    def settle(self) -> None:
        """Fetches content that was only announced.

        Raises:
            TransferAbortedError: Its structure has changed: the announced content will never be sent.
            Others: As raised by what fetches it; the same applies.
        """

    def post(self, content_channel: ContentChannel | None, tag: int, pool: BufferPool) -> list[Work]:
        """Starts to send what follows the request; the leaves must not change until the works are done."""
        return []

    def send(self, content_channel: ContentChannel | None, tag: int, pool: BufferPool, timeout_s: float) -> list[Work]:
        """Sends everything.

        Small content is only posted: the answer shows whether the server received it, and waiting for that
        does not harm the channel."""
        return self.post(content_channel, tag, pool)
