"""Small reads that a data worker answers without control.

A read of a store that control has let a client read before needs no decision: the store's files tell whether it still
exists, and its generations whether a row moved. Nor does a sample in which every live row has the same probability.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock

from tdserve.base.config import MAIL_BYTES
from tdserve.base.errors import CorruptDataError
from tdserve.base.logs import name_request
from tdserve.control.status import encode_failure
from tdserve.data.mapped_stores import MappedStore, OpenStores
from tdserve.data.own_reads import OwnReads
from tdserve.data.read_plans import plan_read
from tdserve.data.rows_source import make_rows_source
from tdserve.data.stored_entries import encode_entries, find_entries
from tdserve.data.values import read_values
from tdserve.messages.content import (
    ReadStatus,
    cut_values,
    decode_paths,
    make_rows_layout,
    make_status_column,
    select_keys,
)
from tdserve.messages.layout import Message
from tdserve.messages.row_numbers import spread
from tdserve.messages.selection.selection import from_message
from tdserve.rules.replay.allocation.shared_numbers import NO_READER, FoundRows
from tdserve.rules.tags import make_tag
from tdserve.structure.trees.tree import Spec
from tdserve.transport.appended import BytesEnd
from tdserve.transport.sources_sinks import Source
from tdserve.transport.stream import pack
from tdserve.v1 import control_pb2
from tdserve.worker.observed_work import ObservedWork

_log = logging.getLogger("tdserve.worker")

MAX_SENT_BYTES = 256 * 1024
"""Largest content that the thread that reads mail sends: gathering it takes some 50 microseconds."""

MAX_SENT_VALUES_BYTES = 512 * 1024
"""Largest block of values that it sends: reading one takes as long as the client needs to decode a quarter of it."""

SENT = b""
"""Returned instead of an answer: the content was sent, and is the answer."""

Send = Callable[[int, Sequence[Message], Source], None]
"""Sends messages with a tag, without waiting."""


@dataclass
class ReadCounts:
    """Counts of answers: inline, and over the channel."""

    num_inline: int = 0
    nbytes_inline: int = 0
    num_sent: int = 0
    nbytes_sent: int = 0


class SmallReads:
    """Answers requests that the worker can answer alone. Threads: each session's thread calls it.

    Args:
        stores: The worker's.
        inline_bytes: Content up to this size travels inside an answer.
        place: The worker's place among the readers that draw rows by themselves; by default it draws none.
        observed: Counts the answers, by their time.
    """

    def __init__(
        self,
        stores: OpenStores,
        *,
        inline_bytes: int,
        place: int = NO_READER,
        observed: ObservedWork | None = None,
    ) -> None:
        self._stores = stores
        self._observed = ObservedWork() if observed is None else observed
        self._own_reads = OwnReads(place)
        self._inline_bytes = inline_bytes
        self._lock = Lock()
        self._counts = ReadCounts()

    def take_counts(self) -> ReadCounts:
        """Returns the counts since the last call."""
        with self._lock:
            counts, self._counts = self._counts, ReadCounts()
            return counts

    def answer(
        self, content: bytes, send: Send | None = None, *, channel_number: int = 0, session: int = 0
    ) -> bytes | None:
        """Returns the serialised ServerMessage for a serialised ClientMessage, or ``SENT``; None if control must be
        asked.

        Args:
            send: Sends content at once; None if that is not possible now.
            channel_number: Number of the channel on which ``send`` sends.
            session: Number of the session, for the id of a request that fails.
        """
        begun_s, code = time.perf_counter(), ""
        message = control_pb2.ClientMessage()
        try:
            message.ParseFromString(content)
            answer = self._answer_message(message, send, channel_number, session)
        except CorruptDataError as error:
            if not error.request_id:
                return None  # control finds the same, and answers it
            code = error.code
            answer = control_pb2.ServerMessage(
                request=message.request, failure=encode_failure(error)
            ).SerializeToString()
        except Exception:  # noqa: BLE001 (also what torch thinks of an index: control finds the same, and answers it)
            return None
        if answer is not None:
            self._observed.count(message.WhichOneof("body") or "", begun_s, code)
        return answer

    def _answer_message(
        self, message: control_pb2.ClientMessage, send: Send | None, channel_number: int, session: int
    ) -> bytes | None:
        kind = message.WhichOneof("body")
        if kind == "get":
            return self._answer_get(message.request, message.get)
        asked = message.sample if kind == "sample" else message.read if kind == "read" else None
        store = None if asked is None else self._stores.find_readable(asked.store)
        if asked is None or store is None or not _is_meant(asked, store):
            return None
        if asked.message_nbytes and message.channel != channel_number:
            return None
        if store.is_table:
            try:
                return self._answer_rows(message.request, asked, store, send, channel_number)
            except CorruptDataError as error:
                if kind == "sample" and store.is_current:  # control would draw other rows, and hide the damage
                    _end_sample(message, error, send, session)
                raise
        return self._answer(message.request, message.read, store, send)

    def _answer(
        self, request: int, asked: control_pb2.ReadRequest, store: MappedStore, send: Send | None
    ) -> bytes | None:
        if asked.HasField("newer_than"):
            return None
        plan = plan_read(store, asked)
        expected, nbytes = tuple(asked.message_nbytes), sum(plan.layout.message_nbytes)
        paths = [path for path, _ in plan.spec.values]
        if (paths and expected) or nbytes > (MAX_SENT_BYTES if expected else self._inline_bytes):
            return None
        # The first of several messages would be sent before it is known whether its rows stay unchanged.
        if expected and (send is None or expected != plan.layout.message_nbytes or len(expected) > 1):
            return None
        before = store.generations.values[plan.watched].copy()
        if (before & 1).any():
            return None
        version = store.generations.content_version
        plan.compare_rows(store)
        source = plan.make_source(store, plan.make_trailer(store, before))
        if expected and send is not None:
            send(make_tag(request), plan.layout.messages, source)
            self._count_sent(nbytes)
            return SENT
        values = read_values(store, paths, plan.elements) if paths else b""
        inline = pack(plan.layout.messages, source)  # behind the values: its end shows whether anything was written
        if not store.is_current:
            return None
        accepted = control_pb2.Accepted(fingerprint=asked.fingerprint, version=version, values=values)
        return self._make_mail(request, control_pb2.Done(inline=inline, accepted=accepted), len(inline))

    def _answer_rows(
        self,
        request: int,
        asked: control_pb2.ReadRequest | control_pb2.SampleRequest,
        store: MappedStore,
        send: Send | None,
        channel_number: int,
    ) -> bytes | None:
        """Answers a read of a table's rows by number, or a plain sample."""
        found = self._find_rows(asked, store)
        if found is None:
            return None
        spec = _select(asked, store)
        num_rows, paths = len(found.rows), [path for path, _ in spec.values]
        layout = make_rows_layout(spec, num_rows)
        nbytes, expected = sum(layout.message_nbytes), tuple(asked.message_nbytes)
        if nbytes > MAX_SENT_BYTES or (expected and (paths or expected != layout.message_nbytes)):
            return None
        if len(layout.messages) > 1:
            send = None  # the first of several would be sent before it is known whether the others can be
        values_nbytes = num_rows * store.row_values_nbytes if paths else 0
        # Before the rows are read: control draws others, so that what is left to it must not depend on their content.
        if values_nbytes > MAX_SENT_VALUES_BYTES or (send is None and (expected or nbytes > self._inline_bytes)):
            return None
        values = read_values(store, paths, spread(found.rows, math.prod(store.spec.batch_size[1:]))) if paths else b""
        if spec is store.spec:
            store.row_values_nbytes = len(values) // num_rows
        source = make_rows_source(store, layout, found, {})
        if not store.is_current:
            return None
        accepted = control_pb2.Accepted(num_rows=num_rows)
        if not expected and nbytes + len(values) <= self._inline_bytes:
            accepted.values = values
            done = control_pb2.Done(inline=pack(layout.messages, source), accepted=accepted)
            answer = self._make_mail(request, done, nbytes)
            if answer is not None:
                self._count_drawn(asked, store)
            return answer
        if send is None or len(values) > MAX_SENT_VALUES_BYTES:
            return None
        self._count_drawn(asked, store)  # first: the client may ask for the count as soon as it has the rows
        send(make_tag(request), layout.messages, source)
        if values:
            send(make_tag(request), cut_values(len(values)), BytesEnd(values))
        self._count_sent(nbytes + len(values))
        if expected:
            return SENT
        accepted.values_nbytes, accepted.channel = len(values), channel_number
        return control_pb2.ServerMessage(request=request, accepted=accepted).SerializeToString()

    def _count_drawn(self, asked: control_pb2.ReadRequest | control_pb2.SampleRequest, store: MappedStore) -> None:
        if isinstance(asked, control_pb2.SampleRequest) and not asked.replaces_torn:
            self._own_reads.count_drawn(store, asked.num_rows * max(asked.num_batches, 1))

    def _find_rows(
        self, asked: control_pb2.ReadRequest | control_pb2.SampleRequest, store: MappedStore
    ) -> FoundRows | None:
        if isinstance(asked, control_pb2.ReadRequest):
            return self._own_reads.find_listed(store, from_message(asked.selection))
        num_rows = asked.num_rows * max(asked.num_batches, 1)
        is_small = asked.is_plain and num_rows * max(store.row_nbytes, 1) <= MAX_SENT_BYTES
        return self._own_reads.draw(store, num_rows) if is_small else None

    def _make_mail(self, request: int, done: control_pb2.Done, nbytes: int) -> bytes | None:
        """Returns the answer with content of this many bytes, and counts it; None if it does not fit into mail."""
        answer = control_pb2.ServerMessage(request=request, done=done).SerializeToString()
        if len(answer) > MAIL_BYTES:
            return None
        with self._lock:
            self._counts.num_inline += 1
            self._counts.nbytes_inline += nbytes
        return answer

    def _count_sent(self, nbytes: int) -> None:
        with self._lock:
            self._counts.num_sent += 1
            self._counts.nbytes_sent += nbytes

    def _answer_get(self, request: int, asked: control_pb2.GetRequest) -> bytes | None:
        """Answers a get of entries if all are there and few bytes: a record is of the moment at which it was read."""
        store = self._stores.find_readable(asked.store)
        if store is None or asked.asks_versions or store.spec.fingerprint != asked.fingerprint:
            return None
        found = find_entries(store, asked.keys)
        nbytes = sum(map(len, found.records))
        if 0 in found.versions or nbytes > self._inline_bytes or not store.is_current:
            return None
        accepted = control_pb2.Accepted(values=encode_entries(found, asks_versions=False))
        return self._make_mail(request, control_pb2.Done(accepted=accepted), nbytes)


def _end_sample(message: control_pb2.ClientMessage, error: CorruptDataError, send: Send | None, session: int) -> None:
    """Makes an error the answer to a sample, as control does: the log and the error have the request's id, and a client
    that waits for content gets void content."""
    nbytes = sum(message.sample.message_nbytes)
    if nbytes and send is not None:
        status = make_status_column(ReadStatus.FAILED).tobytes()
        send(make_tag(message.request), cut_values(nbytes), BytesEnd(bytes(nbytes - len(status)) + status))
    error.note_request(f"{session}-{message.request}")
    _log.error("a request has failed: %s: %s", error.code, error, extra=name_request(error.request_id))


def _select(asked: control_pb2.ReadRequest | control_pb2.SampleRequest, store: MappedStore) -> Spec:
    """Returns the structure of what is asked for."""
    return (
        select_keys(store.spec, decode_paths(asked.keys)) if isinstance(asked, control_pb2.ReadRequest) else store.spec
    )


def _is_meant(asked: control_pb2.ReadRequest | control_pb2.SampleRequest, store: MappedStore) -> bool:
    """Returns whether the client means this store, and knows its structure."""
    if not store.is_of_kind(asked.kind):
        return False
    if isinstance(asked, control_pb2.ReadRequest) and asked.identity:
        return asked.identity == store.identity
    return asked.fingerprint == store.spec.fingerprint
