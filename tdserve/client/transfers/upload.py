"""Sends content to the server: a tensordict is captured, laid out, and sent while the request is under way."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tdserve.base.errors import TransferAbortedError
from tdserve.client.content.leaves import copy_contents, make_source
from tdserve.client.session.channels.content_channel import ContentChannel
from tdserve.client.session.requests.outgoing import Outgoing, WriteTarget
from tdserve.client.session.session import Session
from tdserve.messages.content import MIN_SENT_VALUES_BYTES, cut_values, write_layout
from tdserve.messages.layout import Layout
from tdserve.structure.captures.capture import Captured
from tdserve.transport.appended import BytesEnd, SourceBehind
from tdserve.transport.channel import Work
from tdserve.transport.pool import BufferPool
from tdserve.transport.sources_sinks import JoinedSource, Source
from tdserve.transport.stream import pack, send_messages, start_send

MAX_POSTED_BYTES = 32 * 1024 * 1024
"""Up to this size all messages are posted at once; larger content uses a window, to need little staging memory."""


class SentContent(Outgoing):
    """Content that its request contains if it is small; otherwise it follows over the channel.

    Arguments and errors as in ``ClientMover.prepare``.

    Args:
        session: The session that sends it.
    """

    def __init__(
        self,
        captured: Sequence[Captured],
        target: WriteTarget,
        session: Session,
        *,
        margin_nbytes: int = 0,
        fetch: Callable[[], Captured] | None = None,
    ) -> None:
        super().__init__(captured, target)
        self._session = session
        self._fetch = fetch
        self._lay_out(b"".join(self._values), session.inline_bytes - margin_nbytes)
        self._values = []

    def _lay_out(self, values: bytes, inline_bytes: int) -> None:
        spec = self.spec
        if len(self._captured) > 1:
            spec = spec.with_rows(sum(each.spec.batch_size[0] for each in self._captured))
        layout = write_layout(spec, is_packed=self._target.is_packed)
        self._messages = layout.messages
        self._source: Source = BytesEnd(b"") if self._fetch is not None else _make_source(self._captured, layout)
        self.nbytes = self.message.nbytes = sum(layout.message_nbytes)
        if len(values) >= MIN_SENT_VALUES_BYTES and not self._target.is_packed:
            self.message.values_nbytes = len(values)
            self._messages = (*layout.messages, *cut_values(len(values)))
            self._source = SourceBehind(self._source, BytesEnd(values))
            self.nbytes += len(values)
        else:
            self.message.values = values
            if self.nbytes <= inline_bytes:
                self.message.inline = pack(layout.messages, self._source)
                return
        self.is_inline = False
        self.message.message_nbytes.extend(message.nbytes for message in self._messages)

    def settle(self) -> None:
        """Fetches content that was only announced; errors as in ``Outgoing``."""
        fetch, self._fetch = self._fetch, None
        if fetch is None:
            return
        captured = fetch()
        if captured.spec is not self.spec and captured.spec != self.spec:
            raise TransferAbortedError(transfer=0, reason="its structure is another than that of the one before")
        self._captured = [captured]
        self._source = _make_source(self._captured, write_layout(self.spec, is_packed=self._target.is_packed))

    def post(self, content_channel: ContentChannel | None, tag: int, pool: BufferPool) -> list[Work]:
        """Starts to send everything."""
        if content_channel is None or self.is_inline:
            return []
        content_channel.reap()
        return start_send(self._session.contents.get(content_channel), tag, self._messages, self._source, pool)

    def send(self, content_channel: ContentChannel | None, tag: int, pool: BufferPool, timeout_s: float) -> list[Work]:
        """Posts small content, and sends large content."""
        if content_channel is None or self.is_inline or self.nbytes <= MAX_POSTED_BYTES:
            return self.post(content_channel, tag, pool)
        channel = self._session.contents.get(content_channel)
        source = self._source
        send_messages(
            channel, tag, self._messages, source, pool=pool, timeout_s=timeout_s, fills_last_after_sends=False
        )
        return []


def _make_source(captured: Sequence[Captured], layout: Layout) -> Source:
    if len(captured) == 1:
        return make_source(captured[0], layout)
    found = [copy_contents(each) for each in captured]  # larger leaves may be elsewhere in the common layout
    return JoinedSource([[each[slot.path] for each in found] for slot in layout.slots])
