"""The mover of a client on the server's machine: this process reads and writes the server's files itself."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from tdserve.base.deadline import Deadline
from tdserve.base.errors import ClosedError, StoreNotFoundError, TDServeError, TransferAbortedError
from tdserve.client.content.leaves import make_leaves
from tdserve.client.content.read_content import Content, on_cpu
from tdserve.client.content.value_blocks import decode_values
from tdserve.client.local.end import LocalEnd
from tdserve.client.local.local_claim import LocalClaim
from tdserve.client.local.local_reads import NOTHING_ADDED, copy_rows, copy_selection
from tdserve.client.session.calls.timeouts import compute_answer_timeout_s
from tdserve.client.session.requests.client_mover import ClientMover, WantedRows, WantedSelection
from tdserve.client.session.requests.outgoing import Outgoing, WriteTarget
from tdserve.client.session.requests.pending import Reply
from tdserve.client.session.session import Session
from tdserve.client.session.session_client import SessionClient
from tdserve.client.transfers.placing import PlacedContent
from tdserve.client.transfers.read import ReceiverSettings, try_decode_values
from tdserve.client.transfers.upload import SentContent
from tdserve.control.status import encode_failure
from tdserve.data.mapped_stores import MappedStore
from tdserve.data.stored_entries import find_entries
from tdserve.messages.content import may_be_packed, read_layout, select_spec, write_layout
from tdserve.messages.row_numbers import decode_repeats, decode_rows
from tdserve.messages.selection.selection import Selection
from tdserve.rules.channel_transports import LOCAL_TRANSPORT
from tdserve.rules.replay.allocation.shared_numbers import FoundRows
from tdserve.store.values.entry_tables import FoundEntries
from tdserve.structure.captures.capture import Captured
from tdserve.structure.trees.tree import Spec
from tdserve.v1 import control_pb2

MAX_TRIES = 100
"""Copies of a selection that is written again and again; each lasts about as long as one of these writes."""

NOTHING_ACCEPTED = control_pb2.Accepted()
"""Of a read without a request."""


class MappedMover(ClientMover):
    """Mover that copies content from and to the server's files, as the server permits.

    Args:
        client: The client of the session.
        session: The session whose content it moves.
        local: The session's local end.
    """

    transport = LOCAL_TRANSPORT
    max_joined_bytes = 32 * 1024 * 1024  # the only cost: they become visible together
    takes_claims = True
    draws_rows = True
    receives_messages = False
    is_ready = True
    inline_bytes = sys.maxsize

    def __init__(self, client: SessionClient, session: Session, local: LocalEnd) -> None:
        self._receiver = ReceiverSettings(client.pool, client.allow_pickle)
        self._client_id = client.catalog.client_id
        self._session = session
        self._local = local

    def prepare(
        self,
        captured: Sequence[Captured],
        target: WriteTarget,
        *,
        margin_nbytes: int = 0,
        fetch: Callable[[], Captured] | None = None,
    ) -> Outgoing:
        """Prepares content that is written in place, or sent if the server makes no files for it yet."""
        if target.is_new and may_be_packed(captured[0].spec):
            sent = SentContent(captured, target, self._session)
            if sent.is_inline and may_be_packed(sent.spec, len(sent.message.values)):
                return sent
        return PlacedContent(captured if fetch is None else [fetch()], target, self._local)

    def take_apart(self, captured: Captured) -> None:
        """Finds the leaves, which the thread that copies the content needs."""
        make_leaves(captured, write_layout(captured.spec))

    def open_claim(self, name: str, stored: Spec, claim: control_pb2.Claim) -> LocalClaim:
        """Opens the claim file."""
        return LocalClaim(self._local, name, stored, claim, client_id=self._client_id)

    def find_known(self, name: str, spec: Spec) -> MappedStore | None:
        """Returns a store that the server has permitted this process to read."""
        return self._local.find_known(name, spec)

    def open_mapped(self, name: str, spec: Spec, accepted: control_pb2.Accepted) -> MappedStore:
        """Maps a store; errors as in ``LocalEnd.store``."""
        return self._local.store(name, accepted.uid, spec, structure=accepted.structure)

    def take_rows(self, reply: Reply, wanted: WantedRows) -> Content:
        """Copies the rows, and reports the end of the copy to the server if it waits for that. The next read by number,
        or plain sample, needs no request."""
        accepted, name, stored = reply.accepted, wanted.name, wanted.stored
        try:
            store = self.open_mapped(name, stored, accepted)
            rows = decode_rows(accepted.rows)
            found = FoundRows(rows, decode_repeats(accepted.generations, len(rows)))
            added = {each.name: each.content for each in accepted.added}
            content = self._copy_rows(store, found, wanted, added=added, accepted=accepted)
            self._local.remember_readable(store)
        except TDServeError as error:
            if accepted.wants_written:
                self._session.answer(reply.request, control_pb2.Written(failure=encode_failure(error)))
            raise
        if accepted.wants_written:
            self._session.answer(reply.request, control_pb2.Written())
            reply.pending.wait(compute_answer_timeout_s(reply.deadline), f"the end of a sample of {name!r}")
        return content

    def _copy_rows(
        self,
        store: MappedStore,
        found: FoundRows,
        wanted: WantedRows,
        *,
        added: Mapping[str, bytes] = NOTHING_ADDED,
        accepted: control_pb2.Accepted = NOTHING_ACCEPTED,
    ) -> Content:
        chosen = wanted.chosen
        copied = copy_rows(store, chosen, found, added=added, values=accepted.values, pool=self._receiver.pool)
        spec = on_cpu(chosen.with_rows(len(found.rows)))
        self._session.observed_calls.count_content(bytes_out=spec.nbytes)
        spec, decoded, fault = try_decode_values(self._receiver, spec, copied.values, keeps_fault=wanted.keeps_fault)
        return Content(spec, copied.received.get_leaves(), decoded, 0, accepted, copied.received, fault)

    def read_listed(self, wanted: WantedRows, selection: Selection) -> Content | None:
        """Copies the rows if the server has let this client read the table before."""
        store = self._local.find_table(wanted.name, wanted.stored, wanted.kind)
        found = None if store is None else self._local.own_reads.find_listed(store, selection)
        return None if store is None or found is None else self._copy_rows(store, found, wanted)

    def draw_rows(self, wanted: WantedRows, num_rows: int, *, is_counted: bool) -> Content | None:
        """Draws and copies rows if the server has let this client read the table before."""
        store = self._local.find_table(wanted.name, wanted.stored, wanted.kind)
        found = None if store is None else self._local.own_reads.draw(store, num_rows)
        if store is None or found is None:
            return None
        content = self._copy_rows(store, found, wanted)
        if is_counted:
            self._local.own_reads.count_drawn(store, num_rows)
        return content

    def read_known(self, wanted: WantedSelection, stored: Spec, request: int, deadline: Deadline) -> Content | None:
        """Copies the selection without a request."""
        store = self._local.find_known(wanted.name, stored)
        if store is None or (wanted.known is not None and store.identity != wanted.known.identity):
            return None
        return self._copy_selection(store, wanted)

    def take_selection(self, reply: Reply, wanted: WantedSelection, stored: Spec) -> Content:
        """Copies a selection; repeats that while it is being written. The next read needs no answer."""
        accepted = reply.accepted
        store = self.open_mapped(wanted.name, stored, accepted)
        self._local.remember_readable(store)
        for _ in range(MAX_TRIES):
            content = self._copy_selection(store, wanted, accepted)
            if content is not None:
                return content
            time.sleep(0)  # lets the writer run
        reason = f"rows of {wanted.name!r} were written, again and again, while they were read"
        raise TransferAbortedError(transfer=0, reason=reason)

    def _copy_selection(
        self, store: MappedStore, wanted: WantedSelection, accepted: control_pb2.Accepted | None = None
    ) -> Content | None:
        """Copies a selection; None if it is being written, or the store was deleted."""
        selection, keys, destination, places = wanted.selection, wanted.keys, wanted.destination, None
        if destination is not None:
            chosen = select_spec(store.spec, selection, keys, store=store.name)
            destination.check(chosen)
            places = destination.find_places(read_layout(chosen))
        found = copy_selection(store, selection, keys, accepted, pool=self._receiver.pool, into=places)
        if found is None:
            return None
        self._session.observed_calls.count_content(bytes_out=found.spec.nbytes)
        trusts = self._receiver.allow_pickle if wanted.allow_pickle is None else wanted.allow_pickle
        spec, decoded_values = decode_values(found.spec, found.values, allow_pickle=trusts)
        content = Content(spec, found.leaves, decoded_values, found.version).with_spec(store.spec)
        if destination is not None:
            destination.finish(content, was_direct=places is not None)
        return content

    def find_entries(self, name: str, stored: Spec, keys: Sequence[bytes]) -> FoundEntries | None:
        """Reads the entries of a store that the server has permitted this process to read."""
        store = self._local.find_known(name, stored)
        try:
            return None if store is None else find_entries(store, keys)
        except (ClosedError, StoreNotFoundError):  # deleted just now: another store may have this name
            return None

    def take_entries(self, reply: Reply, name: str, stored: Spec, keys: Sequence[bytes]) -> FoundEntries:
        """Reads the entries. The next read needs no answer."""
        store = self.open_mapped(name, stored, reply.accepted)
        self._local.remember_readable(store)
        found = find_entries(store, keys)
        store.check_current()
        return found

    def locate(self, path: str, uid: str) -> AbstractContextManager[Path]:
        """Yields a path below the root, as this process sees it. Errors as in ``LocalEnd.locate``."""
        return self._local.locate(path, uid)

    def check_maps(self, what: str, *, writable: bool) -> None:
        """Raises NotSupportedError if writing is asked and this process may not write."""
        if writable:
            self._local.check_writable(f"{what} writable")

    def forget_deleted(self) -> None:
        """Unmaps deleted stores and versions."""
        self._local.forget_deleted()
