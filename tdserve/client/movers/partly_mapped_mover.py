"""The mover of a client on the server's machine that cannot read or write all files of the server itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from tdserve.base.deadline import Deadline
from tdserve.client.content.read_content import Content
from tdserve.client.local.local_claim import LocalClaim
from tdserve.client.movers.channel_mover import ChannelMover
from tdserve.client.movers.mapped_mover import MappedMover
from tdserve.client.session.requests.client_mover import ClientMover, WantedRows, WantedSelection
from tdserve.client.session.requests.outgoing import Outgoing, WriteTarget
from tdserve.client.session.requests.pending import Reply
from tdserve.client.session.session import Session
from tdserve.client.session.session_client import SessionClient
from tdserve.data.mapped_stores import MappedStore
from tdserve.messages.selection.selection import Selection
from tdserve.rules.channel_transports import LOCAL_TRANSPORT
from tdserve.store.values.entry_tables import FoundEntries
from tdserve.structure.captures.capture import Captured
from tdserve.structure.trees.tree import Spec
from tdserve.v1 import control_pb2


def make_mover(client: SessionClient, session: Session) -> ClientMover:
    """Makes a local mover as far as the session has access to the server's files, else a remote one."""
    channel, local = ChannelMover(client, session), session.local
    if local is None:
        return channel
    mapped = MappedMover(client, session, local)
    if not (local.is_read_only or local.lacks_values):
        return mapped
    return PartlyMappedMover(mapped, channel, writes=channel if local.is_read_only else mapped)


class PartlyMappedMover(ClientMover):
    """Copies what this process can read or write itself out of and into the server's files, and moves the rest over
    the session's channel.

    Args:
        mapped: Moves what is read.
        channel: Moves entries of keyed stores, which this process cannot open.
        writes: The one of the two that moves what is written.
    """

    transport = LOCAL_TRANSPORT
    draws_rows = True
    receives_messages = False

    def __init__(self, mapped: MappedMover, channel: ChannelMover, *, writes: MappedMover | ChannelMover) -> None:
        self.max_joined_bytes, self.takes_claims = writes.max_joined_bytes, writes.takes_claims
        self._reads, self._writes, self._entries = mapped, writes, channel

    @property
    def is_ready(self) -> bool:
        """See ``ClientMover``; delegates to the mover for writes."""
        return self._writes.is_ready

    @property
    def inline_bytes(self) -> int:
        """See ``ClientMover``; delegates to the mover for writes."""
        return self._writes.inline_bytes

    def prepare(
        self,
        captured: Sequence[Captured],
        target: WriteTarget,
        *,
        margin_nbytes: int = 0,
        fetch: Callable[[], Captured] | None = None,
    ) -> Outgoing:
        """See ``ClientMover``; delegates to the mover for writes."""
        return self._writes.prepare(captured, target, margin_nbytes=margin_nbytes, fetch=fetch)

    def take_apart(self, captured: Captured) -> None:
        """See ``ClientMover``; delegates to the mover for writes."""
        self._writes.take_apart(captured)

    def open_claim(self, name: str, stored: Spec, claim: control_pb2.Claim) -> LocalClaim:
        """See ``ClientMover``; delegates to the mover for writes."""
        return self._writes.open_claim(name, stored, claim)

    def find_known(self, name: str, spec: Spec) -> MappedStore | None:
        """See ``MappedMover``."""
        return self._reads.find_known(name, spec)

    def open_mapped(self, name: str, spec: Spec, accepted: control_pb2.Accepted) -> MappedStore:
        """See ``MappedMover``."""
        return self._reads.open_mapped(name, spec, accepted)

    def take_rows(self, reply: Reply, wanted: WantedRows) -> Content:
        """See ``MappedMover``."""
        return self._reads.take_rows(reply, wanted)

    def read_listed(self, wanted: WantedRows, selection: Selection) -> Content | None:
        """See ``MappedMover``."""
        return self._reads.read_listed(wanted, selection)

    def draw_rows(self, wanted: WantedRows, num_rows: int, *, is_counted: bool) -> Content | None:
        """See ``MappedMover``."""
        return self._reads.draw_rows(wanted, num_rows, is_counted=is_counted)

    def read_known(self, wanted: WantedSelection, stored: Spec, request: int, deadline: Deadline) -> Content | None:
        """See ``MappedMover``."""
        return self._reads.read_known(wanted, stored, request, deadline)

    def take_selection(self, reply: Reply, wanted: WantedSelection, stored: Spec) -> Content:
        """See ``MappedMover``."""
        return self._reads.take_selection(reply, wanted, stored)

    def find_entries(self, name: str, stored: Spec, keys: Sequence[bytes]) -> FoundEntries | None:
        """See ``ClientMover``; delegates to the mover of entries."""
        return self._entries.find_entries(name, stored, keys)

    def take_entries(self, reply: Reply, name: str, stored: Spec, keys: Sequence[bytes]) -> FoundEntries:
        """See ``ClientMover``; delegates to the mover of entries."""
        return self._entries.take_entries(reply, name, stored, keys)

    def locate(self, path: str, uid: str) -> AbstractContextManager[Path]:
        """See ``MappedMover``."""
        return self._reads.locate(path, uid)

    def check_maps(self, what: str, *, writable: bool) -> None:
        """See ``MappedMover``."""
        self._reads.check_maps(what, writable=writable)

    def forget_deleted(self) -> None:
        """See ``MappedMover``."""
        self._reads.forget_deleted()
