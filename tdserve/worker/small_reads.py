"""Small reads that a data worker answers without control.

A read of a store that control has granted before needs no decision: that the store still exists stands in its files,
and that no row moved in its generations.
"""

from __future__ import annotations

from threading import Lock

from tdserve.data.opened import OpenStores
from tdserve.data.reads import plan_read
from tdserve.transport.stream import pack
from tdserve.v1 import control_pb2


class SmallReads:
    """Answers requests of a client that the worker can answer alone. Threads: each session's calls it from its own.

    Args:
        stores: The worker's.
        inline_bytes: Content up to this size rides in an answer.
    """

    def __init__(self, stores: OpenStores, *, inline_bytes: int) -> None:
        self._stores = stores
        self._inline_bytes = inline_bytes
        self._lock = Lock()
        self._num_answered = 0
        self._nbytes = 0

    def take_counts(self) -> tuple[int, int]:
        """Number of answers since the last call, and the bytes of their content."""
        with self._lock:
            counts = self._num_answered, self._nbytes
            self._num_answered = self._nbytes = 0
            return counts

    def answer(self, content: bytes) -> bytes | None:
        """The serialised ServerMessage for a serialised ClientMessage; None when control must be asked."""
        try:
            message = control_pb2.ClientMessage.FromString(content)
            if message.WhichOneof("body") != "read":
                return None
            return self._answer(message.request, message.read)
        except Exception:  # noqa: BLE001 (also what torch thinks of an index: control finds the same, and says so)
            return None

    def _answer(self, request: int, asked: control_pb2.ReadRequest) -> bytes | None:
        store = self._stores.granted(asked.store)
        if store is None or asked.fingerprint != store.spec.fingerprint or asked.HasField("newer_than"):
            return None
        plan = plan_read(store, asked)
        if plan.spec.values or sum(plan.layout.message_nbytes) > self._inline_bytes:
            return None
        before = store.generations.values[plan.watched].copy()
        if (before & 1).any():
            return None
        version = store.generations.content_version
        inline = pack(plan.layout.messages, plan.source(store, plan.trailer(store, before)))
        if not store.is_current:
            return None
        with self._lock:
            self._num_answered += 1
            self._nbytes += len(inline)
        accepted = control_pb2.Accepted(fingerprint=asked.fingerprint, version=version)
        done = control_pb2.Done(inline=inline, accepted=accepted)
        return control_pb2.ServerMessage(request=request, done=done).SerializeToString()
