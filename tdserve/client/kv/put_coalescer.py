"""Coalesces puts: those that a caller makes faster than they are acknowledged share a request.

One request of a handle is under way at a time, and what is put in the meantime shares the next one: so puts are carried
out in the order of their calls, whatever way their content takes. Each call keeps its own future and its own versions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from tdserve.base.deadline import Deadline
from tdserve.base.errors import CapacityError, DeadlineExceededError, RequestError, TDServeError
from tdserve.client.session.calls.awaitable_future import AwaitableFuture
from tdserve.client.session.requests.outgoing import Outgoing, WriteTarget
from tdserve.client.session.requests.pending import MAX_POLL_S
from tdserve.client.session.session import Session
from tdserve.client.session.session_client import SessionClient
from tdserve.client.transfers.coalescer import Coalescer, fail_parts, find_first_deadline
from tdserve.client.transfers.write import MakeBody, MakeOutgoing, write, write_early
from tdserve.structure.captures.capture import Captured
from tdserve.structure.trees.nodes import Node, ValueLeaf
from tdserve.structure.trees.tree import Spec
from tdserve.v1 import control_pb2
from tdserve.values.value_bundles import SplitColumn

MAX_JOINED_BYTES = 4 * 1024 * 1024
"""Records that share a request."""

MAX_JOINED_KEYS = 8192
"""Entries that share a request: the worker stores them in some ten milliseconds."""

_RECORDS = "records"


@dataclass(frozen=True)
class PutPart:
    """One put.

    Attributes:
        keys, records: Its entries.
        if_versions: Versions that they must have; None: any.
        deadline: Its own.
        what: Names it in the error of a timeout.
        is_alone: Whether it must not share a request.
        future: Gets the version of the first entry; those of the others follow.
    """

    keys: list[bytes]
    records: SplitColumn
    if_versions: list[int] | None
    deadline: Deadline
    what: str
    is_alone: bool = False
    future: AwaitableFuture[int] = field(default_factory=AwaitableFuture.make_running)

    @property
    def nbytes(self) -> int:
        """Size of its records."""
        return self.records.nbytes


class PutCoalescer(Coalescer[PutPart]):
    """Puts of one handle. Threads: safe.

    Args:
        client: Whose requests they are.
        store: Name of the store.
        fingerprint: Fingerprint of the structure of the store's files.
    """

    def __init__(self, client: SessionClient, store: str, fingerprint: bytes) -> None:
        super().__init__(client)
        self._fingerprint = fingerprint
        self._target = WriteTarget(store, b"")
        self._waiting: deque[PutPart] = deque()
        self._under_way: Future[control_pb2.Done] | None = None
        self._unsettled: set[AwaitableFuture[int]] = set()  # of all parts that wait, are being sent or are under way

    @property
    def is_waiting(self) -> bool:
        """Whether puts are under way, which no other may overtake."""
        with self._lock:
            return self._is_sending or bool(self._waiting) or self._under_way is not None

    def send(self, part: PutPart) -> int:
        """Sends a put by itself and waits for the version of its first entry."""
        make_outgoing, make_body = self._make_recipe([part])
        done = write(
            self._client,
            make_outgoing,
            make_body,
            deadline=part.deadline,
            what=part.what,
            store=self._target.store,
        )
        return int(done.version)

    def flush(self, deadline: Deadline) -> None:
        """Waits until everything that was submitted before this call is answered, or has failed.

        Raises:
            DeadlineExceededError: It was not in time.
        """
        before = list(self._unsettled)
        while before := [future for future in before if not future.done()]:
            if deadline.expired:
                what = f"the puts to {self._target.store!r} that were made before"
                raise DeadlineExceededError(what=what, timeout_s=deadline.timeout_s)
            wait(before, deadline.limit(MAX_POLL_S))

    def _list_unfinished(self) -> list[Future[Any]]:
        return [*(part.future for part in self._waiting), *([] if self._under_way is None else [self._under_way])]

    def _append(self, part: PutPart) -> None:
        self._waiting.append(part)
        self._unsettled.add(part.future)
        part.future.add_done_callback(self._unsettled.discard)

    def _take_out(self, is_meant: Callable[[PutPart], bool]) -> list[PutPart]:
        taken: list[PutPart] = []
        waiting, self._waiting = self._waiting, deque()
        for part in waiting:
            (taken if is_meant(part) else self._waiting).append(part)
        return taken

    def _take_next(self) -> list[PutPart]:
        if self._under_way is not None or not self._waiting:
            return []
        first = self._waiting.popleft()
        parts, nbytes, num_keys = [first], first.nbytes, len(first.keys)
        while self._waiting and not first.is_alone:
            following = self._waiting[0]
            nbytes += following.nbytes
            num_keys += len(following.keys)
            is_full = nbytes > MAX_JOINED_BYTES or num_keys > MAX_JOINED_KEYS
            if is_full or following.is_alone or not first.deadline.is_near(following.deadline):
                break
            parts.append(self._waiting.popleft())
        return parts

    def _put_back(self, parts: list[PutPart]) -> None:
        self._waiting.extendleft(reversed(parts))

    def _send(self, parts: list[PutPart]) -> None:
        request: int | None = None
        try:
            request = self._begin(parts)
            if request is None:
                return
            make_outgoing, make_body = self._make_recipe(parts)
            deadline = find_first_deadline(parts)
            done = write_early(
                self._client, make_outgoing, make_body, request=request, deadline=deadline, what=parts[0].what
            )
        except BaseException as fault:
            self._fail_unsent(parts, request, fault)
            if isinstance(fault, TDServeError):
                return
            raise
        with self._lock:
            self._under_way = done
        # The future is an argument: a closure over it would keep the future, and the parts with it, alive.
        done.add_done_callback(lambda done: self._settle(done, parts))

    def _make_recipe(self, parts: list[PutPart]) -> tuple[MakeOutgoing, MakeBody]:
        keys = [key for part in parts for key in part.keys]
        records = SplitColumn.join([part.records for part in parts])
        captured = Captured(_make_spec(len(keys)), {}, {(_RECORDS,): records}, {})

        def make_outgoing(session: Session) -> Outgoing:
            return session.movers.writes.prepare([captured], self._target)

        def make_body(session: Session, outgoing: Outgoing, deadline: Deadline) -> dict[str, Any]:
            put = control_pb2.PutRequest(
                store=self._target.store,
                fingerprint=self._fingerprint,
                keys=keys,
                if_versions=parts[0].if_versions,
                content=outgoing.message,
                timeout_s=deadline.remaining_s,
            )
            return {"put": put}

        return make_outgoing, make_body

    def _settle(self, done: Future[control_pb2.Done], parts: list[PutPart]) -> None:
        error = done.exception()
        with self._lock:
            self._under_way = None
            if isinstance(error, (RequestError, CapacityError)) and len(parts) > 1:
                # Refused together, perhaps because of one of them: sent one by one.
                self._put_back([replace(part, is_alone=True) for part in parts])
                parts = []
        if error is not None:
            fail_parts(parts, error)
        else:
            version = int(done.result().version)
            for part in parts:
                part.future.set_result(version)
                version += len(part.keys)
        self._go_on()


@lru_cache(maxsize=64)
def _make_spec(num_records: int) -> Spec:
    """Returns the structure in which records travel: values, one per row."""
    return Spec(Node((num_records,), None, None, None, ((_RECORDS, ValueLeaf((num_records,), per_row=True)),)))
