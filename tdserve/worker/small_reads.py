"""Small reads that a data worker answers without control.

A read of a store that control has let a client read before needs no decision: the store's files tell whether it still
exists, and its generations whether a row moved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock

from tdserve.base.config import MAIL_BYTES
from tdserve.data.opened import OpenStores
from tdserve.data.read_plans import plan_read
from tdserve.data.stored_entries import encode_entries, find_entries
from tdserve.messages.layout import Message
from tdserve.rules.tags import make_tag
from tdserve.transport.sources_sinks import Source
from tdserve.transport.stream import pack
from tdserve.v1 import control_pb2

MAX_SENT_BYTES = 256 * 1024
"""Largest content that the thread that reads mail sends: gathering it takes some 50 microseconds."""

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
    """

    def __init__(self, stores: OpenStores, *, inline_bytes: int) -> None:
        self._stores = stores
        self._inline_bytes = inline_bytes
        self._lock = Lock()
        self._counts = ReadCounts()

    def take_counts(self) -> ReadCounts:
        """Returns the counts since the last call."""
        with self._lock:
            counts, self._counts = self._counts, ReadCounts()
            return counts

    def answer(self, content: bytes, send: Send | None = None, *, channel_number: int = 0) -> bytes | None:
        """Returns the serialised ServerMessage for a serialised ClientMessage, or ``SENT``; None if control must be
        asked.

        Args:
            send: Sends content for which the client already waits; None if that is not possible now.
            channel_number: Number of the channel on which ``send`` sends.
        """
        try:
            message = control_pb2.ClientMessage.FromString(content)
            kind = message.WhichOneof("body")
            if kind == "get":
                return self._answer_get(message.request, message.get)
            if kind != "read":
                return None
            return self._answer(message.request, message.read, send if message.channel == channel_number else None)
        except Exception:  # noqa: BLE001 (also what torch thinks of an index: control finds the same, and says so)
            return None

    def _answer(self, request: int, asked: control_pb2.ReadRequest, send: Send | None) -> bytes | None:
        store = self._stores.find_readable(asked.store)
        if store is None or asked.fingerprint != store.spec.fingerprint or asked.HasField("newer_than"):
            return None
        plan = plan_read(store, asked)
        expected, nbytes = tuple(asked.message_nbytes), sum(plan.layout.message_nbytes)
        if plan.spec.values or nbytes > (MAX_SENT_BYTES if expected else self._inline_bytes):
            return None
        # The first of several messages would be sent before it is known whether its rows stay unchanged.
        if expected and (send is None or expected != plan.layout.message_nbytes or len(expected) > 1):
            return None
        before = store.generations.values[plan.watched].copy()
        if (before & 1).any():
            return None
        version = store.generations.content_version
        source = plan.make_source(store, plan.make_trailer(store, before))
        if expected and send is not None:
            send(make_tag(request), plan.layout.messages, source)
            with self._lock:
                self._counts.num_sent += 1
                self._counts.nbytes_sent += nbytes
            return SENT
        inline = pack(plan.layout.messages, source)
        if not store.is_current:
            return None
        with self._lock:
            self._counts.num_inline += 1
            self._counts.nbytes_inline += len(inline)
        accepted = control_pb2.Accepted(fingerprint=asked.fingerprint, version=version)
        done = control_pb2.Done(inline=inline, accepted=accepted)
        return control_pb2.ServerMessage(request=request, done=done).SerializeToString()

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
        message = control_pb2.ServerMessage(request=request, done=control_pb2.Done(accepted=accepted))
        answer = message.SerializeToString()
        if len(answer) > MAIL_BYTES:
            return None
        with self._lock:
            self._counts.num_inline += 1
            self._counts.nbytes_inline += nbytes
        return answer
