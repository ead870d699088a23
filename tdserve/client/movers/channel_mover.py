"""The mover of a client that reaches the server over the network."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tdserve.base.deadline import Deadline
from tdserve.base.errors import NotSupportedError
from tdserve.client.content.read_content import Content, on_cpu
from tdserve.client.session.calls.timeouts import may_expect
from tdserve.client.session.requests.client_mover import ClientMover, WantedRows, WantedSelection
from tdserve.client.session.requests.outgoing import Outgoing, WriteTarget
from tdserve.client.session.requests.pending import Announced, OnAnnounced, Pending, Reply
from tdserve.client.session.session import Session
from tdserve.client.session.session_client import SessionClient
from tdserve.client.transfers.download import post_announced, post_known_size, receive_answer
from tdserve.client.transfers.read import ReceiverSettings, finish_known_size, finish_read
from tdserve.client.transfers.upload import SentContent
from tdserve.data.stored_entries import decode_entries
from tdserve.messages.content import make_rows_layout, read_layout, select_spec
from tdserve.rules.tags import make_tag
from tdserve.store.values.entry_tables import FoundEntries
from tdserve.structure.captures.capture import Captured
from tdserve.structure.trees.tree import Spec
from tdserve.v1 import control_pb2

MAX_EXPECTED_BYTES = 16 * 1024 * 1024
"""Content up to this size is awaited before it is announced. For larger content the announcement takes only a hundredth
of the time, and if the store has changed, as many bytes would be wasted."""


class ChannelMover(ClientMover):
    """Mover that sends and receives content in messages; small content in requests and answers.

    Args:
        client: The client of the session.
        session: The session whose content it moves.
    """

    def __init__(self, client: SessionClient, session: Session) -> None:
        self.transport = session.channel_transport
        self._receiver = ReceiverSettings(client.pool, client.allow_pickle)
        self._session = session

    @property
    def is_ready(self) -> bool:
        """Whether the channel is open."""
        return self._session.contents.current.is_open

    @property
    def inline_bytes(self) -> int:
        """The limit that the server has set."""
        return self._session.inline_bytes

    def prepare(
        self,
        captured: Sequence[Captured],
        target: WriteTarget,
        *,
        margin_nbytes: int = 0,
        fetch: Callable[[], Captured] | None = None,
    ) -> Outgoing:
        """Prepares content that is sent in messages."""
        return SentContent(captured, target, self._session, margin_nbytes=margin_nbytes, fetch=fetch)

    def make_early_receiver(self, request: int, make_wanted: Callable[[], WantedRows]) -> OnAnnounced | None:
        """See ClientMover.

        The worker sends the content of one request after the other, not always in the order of the requests. A caller
        that waits for its first request, and received the rows of its second one only after that, would block both.
        """
        session, pool, tag = self._session, self._receiver.pool, make_tag(request)

        def begin(pending: Pending, accepted: control_pb2.Accepted) -> Announced | None:
            wanted = make_wanted()
            layout = make_rows_layout(wanted.chosen, accepted.num_rows, wanted.added)
            return post_announced(layout, session, pending, accepted, tag=tag, pool=pool, device=wanted.device)

        return begin

    def take_rows(self, reply: Reply, wanted: WantedRows) -> Content:
        """Receives the rows."""
        chosen, num_rows = wanted.chosen, reply.accepted.num_rows
        return finish_read(
            self._receiver,
            self._session,
            reply,
            spec=on_cpu(chosen.with_rows(num_rows)),
            layout=make_rows_layout(chosen, num_rows, wanted.added),
            keeps_fault=wanted.keeps_fault,
            device=wanted.device,
        )

    def read_known(self, wanted: WantedSelection, stored: Spec, request: int, deadline: Deadline) -> Content | None:
        """Requests the content and waits for it, without an answer before it, which saves two messages."""
        session = self._session
        if wanted.known is not None or wanted.destination is not None or not may_expect(deadline):
            return None  # what a fingerprint leaves out may have changed, or the content goes elsewhere
        if session.contents.current.is_renewing:
            return None
        chosen = select_spec(stored, wanted.selection, wanted.keys, store=wanted.name)
        if chosen.values:
            return None
        layout = read_layout(chosen)
        if not session.inline_bytes < sum(layout.message_nbytes) <= MAX_EXPECTED_BYTES:
            return None
        asked = wanted.make_message(deadline)
        asked.message_nbytes.extend(layout.message_nbytes)
        pending = session.send(request, content_channel=session.contents.current, read=asked)
        posted = post_known_size(layout, session, pending, make_tag(request), self._receiver.pool, device=wanted.device)
        content = finish_known_size(session, pending, posted, spec=chosen, layout=layout, deadline=deadline)
        return None if content is None else content.with_spec(stored)

    def take_selection(self, reply: Reply, wanted: WantedSelection, stored: Spec) -> Content:
        """Receives the selection."""
        chosen = select_spec(stored, wanted.selection, wanted.keys, store=wanted.name)
        return finish_read(
            self._receiver,
            self._session,
            reply,
            spec=chosen,
            layout=read_layout(chosen),
            destination=wanted.destination,
            device=wanted.device,
            allow_pickle=wanted.allow_pickle,
        ).with_spec(stored)

    def take_entries(self, reply: Reply, name: str, stored: Spec, keys: Sequence[bytes]) -> FoundEntries:
        """Receives the entries."""
        accepted = reply.accepted
        if not accepted.values_nbytes:
            return decode_entries(accepted.values)
        block = self._receiver.pool.take(accepted.values_nbytes)
        receive_answer(read_layout(stored), self._session, reply, pool=self._receiver.pool, values=block)
        return decode_entries(block.numpy().tobytes())

    def check_maps(self, what: str, *, writable: bool) -> None:
        """Raises NotSupportedError: a remote client cannot map stores."""
        why = self._session.why_not_local or f"this client was set to use {self.transport}"
        reason = f"it needs transport 'shm', which is not available here: {why}; read the store instead"
        raise NotSupportedError(feature=what, reason=reason)
