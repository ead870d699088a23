"""Content on its way to the server: a tensordict taken apart, laid out, and sent while the request is on its way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tdserve.base.errors import LocalProtocolError, TransferAbortedError
from tdserve.client.content.leaves import contents_of, leaves_of, source_of
from tdserve.client.content.value_blocks import encode_parts, may_bundle
from tdserve.client.local.writes import put_rows, put_selection, put_version
from tdserve.client.session.content_channel import ContentChannel
from tdserve.client.session.pending import OnGranted
from tdserve.client.session.session import Session
from tdserve.messages.content import MIN_SENT_VALUES_BYTES, values_messages, write_layout
from tdserve.messages.layout import Layout
from tdserve.messages.selection.selection import Selection
from tdserve.structure.capture import Captured
from tdserve.structure.tree import Spec
from tdserve.transport.appended import BytesEnd, SourceBehind
from tdserve.transport.channel import Work
from tdserve.transport.pool import BufferPool
from tdserve.transport.sources_sinks import JoinedEnd, Source
from tdserve.transport.stream import pack, send_messages, start_send
from tdserve.v1 import control_pb2

MAX_POSTED_BYTES = 32 * 1024 * 1024
"""Up to this size all messages are posted at once; above, a window keeps the staging memory small."""


_EVERYTHING = Selection()


@dataclass(frozen=True)
class Target:
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


class Outgoing:
    """The content of one write, ready to be sent any number of times (once per attempt), or put in place.

    Args:
        captured: What is written: one tensordict, or the rows of several of one structure, one after the other; several
            may have no values.
        target: Where it goes.
        session: Through which; small content rides in the request, that of a local session is written in place.
        margin_nbytes: What else the request carries.
        fetch: Gives the content when the request is on its way; ``captured`` is only what the request announces: a
            structure without values, of more than rides in a request.

    Attributes:
        spec: The structure of the first that is written.
        content_nbytes: Of everything that is written.
        message: What the request says of the content.
        spooled: Where a local session has put the values.

    Raises:
        TooLargeError: The non-tensor values are larger than a message may be. Nothing was sent.
        NotSupportedError: One of them cannot travel; names its key. Nothing was sent.
    """

    def __init__(
        self,
        captured: Sequence[Captured],
        target: Target,
        session: Session,
        *,
        margin_nbytes: int = 0,
        fetch: Callable[[], Captured] | None = None,
    ) -> None:
        self._captured = captured
        self._target = target
        self._session = session
        self._fetch = fetch
        first = captured[0]
        self.spec = first.spec
        several = [each.values for each in captured]
        is_bundled = self._may_bundle()
        values = encode_parts(
            first.spec, several, store=target.store, allow_pickle=target.allow_pickle, is_bundled=is_bundled
        )
        self.content_nbytes = sum(each.spec.nbytes for each in captured) + sum(map(len, values))
        self._values = b""
        self.message = control_pb2.Content(fingerprint=target.fingerprint, is_bundled=is_bundled)
        self.spooled: tuple[int, int] | None = None
        if session.local is None:
            self._values = b"".join(values)
            self._lay_out(session.inline_bytes - margin_nbytes)
            return
        session.local.check_writable(f"writing to {target.store!r}")
        if target.is_packed:  # a version's lie beside its file, and are written with it
            self._values = b"".join(values)
            return
        self.spooled = session.local.spool(values)
        if self.spooled is None:
            self.message.values = b"".join(values)
        else:
            self.message.spool_offset, self.message.spool_nbytes = self.spooled

    def _may_bundle(self) -> bool:
        """Whether these are new rows that lack no value, and the worker takes them as they will be kept."""
        spec = self._captured[0].spec
        if self._session.local is None or not self._is_extend or not may_bundle(spec):
            return False
        return self._target.stored is not None and len(spec.values) == len(self._target.stored.values)

    @property
    def _is_extend(self) -> bool:
        target = self._target
        return target.stored is not None and target.fingerprint != target.stored.fingerprint  # that of one row

    def _lay_out(self, inline_bytes: int) -> None:
        spec = self._captured[0].spec
        if len(self._captured) > 1:
            spec = spec.with_rows(sum(each.spec.batch_size[0] for each in self._captured))
        layout = write_layout(spec, is_packed=self._target.is_packed)
        self._messages = layout.messages
        self._source: Source = BytesEnd(b"") if self._fetch is not None else _source(self._captured, layout)
        self.nbytes = self.message.nbytes = sum(layout.message_nbytes)
        if len(self._values) >= MIN_SENT_VALUES_BYTES and not self._target.is_packed:
            self.message.values_nbytes = len(self._values)
            self._messages = (*layout.messages, *values_messages(len(self._values)))
            self._source = SourceBehind(self._source, BytesEnd(self._values))
            self.nbytes += len(self._values)
        else:
            self.message.values = self._values
            if self.nbytes <= inline_bytes:
                self.message.inline = pack(layout.messages, self._source)
                return
        self.message.message_nbytes.extend(message.nbytes for message in self._messages)

    def settle(self) -> None:
        """Takes the content that was only announced.

        Raises:
            TransferAbortedError: It has another structure by now: what the server waits for will never come.
            Others: As of whoever fetches it; the same.
        """
        fetch, self._fetch = self._fetch, None
        if fetch is None:
            return
        captured = fetch()
        if captured.spec is not self.spec and captured.spec != self.spec:
            raise TransferAbortedError(transfer=0, reason="its structure is another than that of the one before")
        self._captured = [captured]
        self._source = _source(self._captured, write_layout(self.spec, is_packed=self._target.is_packed))

    @property
    def place(self) -> OnGranted | None:
        """Of a local session: writes the content where the server lets it, in the thread that brings the grant."""
        return None if self._session.local is None else self._put

    def _put(self, accepted: control_pb2.Accepted) -> control_pb2.Written:
        local, target = self._session.local, self._target
        if local is None:
            raise LocalProtocolError(reason="content was let be written in place over a session that is not local")
        if target.stored is None:
            put_version(local, accepted, self._captured[0], self._values)
            return control_pb2.Written()
        store = local.store(target.store, accepted.uid, target.stored, structure=accepted.structure, path=accepted.path)
        if accepted.rows:
            return put_rows(store, accepted, self._captured, look=local.look)
        put_selection(store, target.selection, self._captured[0])
        return control_pb2.Written()

    def _prepare(self) -> None:
        """Makes what the copying of rows in place needs, while the server still decides where."""
        if self._session.local is not None and self._is_extend:
            for each in self._captured:
                leaves_of(each, write_layout(each.spec))

    @property
    def is_inline(self) -> bool:
        """Whether nothing is sent behind the request."""
        return self._session.local is not None or self.message.HasField("inline")

    def post(self, session: Session, content: ContentChannel | None, tag: int, pool: BufferPool) -> list[Work]:
        """Starts to send everything; the leaves must not change until the works are over."""
        if content is None or self.is_inline:
            self._prepare()
            return []
        content.reap()
        return start_send(session.channel(content), tag, self._messages, self._source, pool)

    def send(
        self, session: Session, content: ContentChannel | None, tag: int, pool: BufferPool, timeout_s: float
    ) -> list[Work]:
        """Sends everything. What is small is only posted: whether the server takes it, its answer tells, and that one
        can wait for without harm to the channel."""
        if content is None or self.is_inline or self.nbytes <= MAX_POSTED_BYTES:
            return self.post(session, content, tag, pool)
        channel = session.channel(content)
        source = self._source
        send_messages(channel, tag, self._messages, source, pool=pool, timeout_s=timeout_s, tells_of_others=False)
        return []


def _source(captured: Sequence[Captured], layout: Layout) -> Source:
    if len(captured) == 1:
        return source_of(captured[0], layout)
    found = [contents_of(each) for each in captured]  # larger leaves may stand elsewhere in the layout of all
    return JoinedEnd([[each[slot.path] for each in found] for slot in layout.slots])
