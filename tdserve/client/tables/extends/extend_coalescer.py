"""Coalesces extends: those that a caller makes faster than they are acknowledged share a request.

A message costs as much as some hundred rows, so batches that would wait behind others are sent together. Each part
keeps its own future and its own row numbers; readers see them all at once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch

from tdserve.base.deadline import Deadline
from tdserve.base.errors import CapacityError, ClosedError, RequestError, StructureChangedError, TDServeError
from tdserve.client.session.calls.reach import reach_within
from tdserve.client.session.requests.client_mover import ClientMover
from tdserve.client.session.requests.outgoing import Outgoing, WriteTarget
from tdserve.client.session.requests.request_numbers import MAX_WRITES_UNDER_WAY
from tdserve.client.session.session import Session
from tdserve.client.session.session_client import SessionClient
from tdserve.client.tables.extends.claim_policy import ClaimPolicy, ClaimRequest, UnknownOutcome
from tdserve.client.tables.extends.extend_parts import ExtendPart, WaitingParts, join_requests
from tdserve.client.tables.table_counts import LastCounts
from tdserve.client.transfers.coalescer import Coalescer, fail_parts, find_first_deadline, is_expired
from tdserve.client.transfers.write import MakeBody, MakeOutgoing, write, write_early
from tdserve.messages.long_lists import find_columns
from tdserve.messages.row_numbers import decode_rows
from tdserve.rules.replay.settings import Settings
from tdserve.structure.captures.capture import Captured
from tdserve.structure.trees.tree import Spec
from tdserve.v1 import content_pb2, control_pb2

MAX_UNDER_WAY = 2
"""While the content of one request is received, the next one is prepared. Requests that cannot be joined are limited
only by the client's window."""


class ExtendCoalescer(Coalescer[ExtendPart]):
    """Extends of one handle that are acknowledged later. Threads: safe.

    Args:
        client: Whose requests they are.
        target: The table.
        settings: Its rules.
        max_rows: Most rows of a shared request; 1 coalesces nothing.
        is_ordered: Whether rows must be committed in the order of their extends: then one request is under way at a
            time.
        counts: Receives the counts in answers.
        uid: Incarnation of the table.
    """

    def __init__(
        self,
        client: SessionClient,
        target: WriteTarget,
        settings: Settings,
        *,
        max_rows: int,
        is_ordered: bool = False,
        counts: LastCounts | None = None,
        uid: str = "",
    ) -> None:
        super().__init__(client)
        self._uid = uid
        self._counts = counts or LastCounts(0, 0)
        self._claim_policy = ClaimPolicy(client, target, settings)
        self._target = target
        self._max_under_way = 1 if is_ordered else MAX_UNDER_WAY if max_rows > 1 else MAX_WRITES_UNDER_WAY
        self._waiting = WaitingParts(max_rows)
        self._under_way: dict[Future[control_pb2.Done], int] = {}
        # A request that was begun before the session or its channel was open. No other is sent until it has ended:
        # it would overtake this one.
        self._opening: Future[control_pb2.Done] | None = None
        self._refused: list[ExtendPart] = []  # of a structure that the table had before; no other overtakes them

    @property
    def stored(self) -> Spec | None:
        """Structure of the table for which it sends."""
        return self._target.stored

    def follow(self, stored: Spec) -> None:
        """Continues with the structure that the table has now."""
        self._target = replace(self._target, fingerprint=stored.fingerprint, stored=stored)
        self._claim_policy.follow(self._target)

    @classmethod
    def from_table(
        cls,
        client: SessionClient,
        target: WriteTarget,
        settings: Settings,
        capacity: int,
        *,
        counts: LastCounts,
        uid: str,
    ) -> ExtendCoalescer:
        """Makes one for a table with these rules."""
        max_rows = capacity // 4 if settings.may_join_extends else 1
        is_ordered = settings.sampler.uses_trajectories
        return cls(client, target, settings, max_rows=max_rows, is_ordered=is_ordered, counts=counts, uid=uid)

    @property
    def is_waiting(self) -> bool:
        """Whether parts wait, are being sent by another thread, or must be finished first.

        No other extend of this handle may overtake them.
        """
        with self._lock:
            is_next = self._opening is None and (self._max_under_way > 1 or not self._under_way) and not self._refused
            return bool(self._waiting) or self._is_sending or not is_next

    def _find_max_bytes(self, first: ExtendPart) -> int:
        """Returns the largest size of a shared request that begins with this part."""
        movers = self._client.movers
        if movers is None or first.row_spec.values:
            return ClientMover.max_joined_bytes
        return movers.writes.max_joined_bytes

    def submit(self, part: ExtendPart) -> None:
        if part.number is not None:
            self._send_in_background(part)
            return
        super().submit(part)
        if (movers := self._client.movers) is not None:
            for captured in part.captured:
                movers.writes.take_apart(captured)

    def _append(self, part: ExtendPart) -> None:
        self._waiting.append(part)

    def _take_out(self, is_meant: Callable[[ExtendPart], bool]) -> list[ExtendPart]:
        taken = [part for part in self._refused if is_meant(part)]
        self._refused = [part for part in self._refused if not is_meant(part)]
        return [*taken, *self._waiting.take_out(is_meant)]

    def _take_next(self) -> list[ExtendPart]:
        return self._waiting.take(self._find_max_bytes(self._waiting.first)) if self._may_send() else []

    def _put_back(self, parts: list[ExtendPart]) -> None:
        self._waiting.put_back(parts)

    def _may_send(self) -> bool:
        if not self._waiting or self._claim_policy.is_awaiting_claim or self._opening is not None or self._refused:
            return False
        if self._under_way and self._client.is_turning:  # they would be overtaken on the new route
            return False
        first = self._waiting.first
        max_bytes = self._find_max_bytes(first)
        is_too_large = 2 * first.nbytes > max_bytes  # too large to share: it need not wait for others
        if (is_too_large or first.is_alone) and self._max_under_way > 1:
            return True
        if len(self._under_way) >= self._max_under_way:
            return False
        return self._waiting.is_enough(sum(self._under_way.values()), max_bytes)

    def send(self, part: ExtendPart) -> torch.Tensor:
        """Sends a part by itself, and waits for its row numbers. Errors as in ``TableHandle.extend``."""
        claim_request = self._claim_policy.make_claim_request(part.request.num_rows)
        make_outgoing, make_body = self._make_recipe([part], claim_request, self._target)
        done = None
        # Rows that were claimed may hold it already: then no other server of a cluster may get it too.
        reach = nullcontext() if part.number is None else reach_within(math.inf)
        try:
            with reach:
                done = write(
                    self._client,
                    make_outgoing,
                    make_body,
                    deadline=part.deadline,
                    what=part.what,
                    request=part.number,
                    store=self._target.store,
                )
        finally:
            if claim_request is not None:
                self._claim_policy.take_answer(claim_request, done)
                self._advance()  # parts that have waited for the answer
        self._counts.update(done)
        return _decode_indices(done)

    def write_claimed(self, captured: Sequence[Captured]) -> torch.Tensor | UnknownOutcome | None:
        """Writes rows without annotations as ``ClaimPolicy.extend`` does; returns None if others wait before them."""
        return None if self.is_waiting else self._write_claimed(captured)

    def _write_claimed(self, captured: Sequence[Captured]) -> torch.Tensor | UnknownOutcome | None:
        begun_s = time.perf_counter()
        found = self._claim_policy.extend(captured)
        if isinstance(found, torch.Tensor):
            self._client.count_call("extend", begun_s, store=self._target.store, num_rows=len(found))
            self._client.observed_calls.count_content(bytes_in=sum(each.spec.nbytes for each in captured))
        return found

    def _write_part_claimed(self, part: ExtendPart) -> bool:
        """Returns whether a part need not be sent: it is stored, or another thread retries it."""
        found = self._write_claimed(part.captured) if part.is_plain else None
        if isinstance(found, torch.Tensor):
            part.future.set_result(found)
        elif found is not None:
            self._send_in_background(part._replace(number=found.request))
        return found is not None

    def _send_in_background(self, part: ExtendPart) -> None:
        sent = self._client.run_later(partial(self.send, part), part.deadline)
        if (number := part.number) is not None:
            sent.add_done_callback(lambda _: self._client.requests.end(number))
        sent.pass_on(part.future)

    def _send(self, parts: list[ExtendPart]) -> None:
        claim_request: ClaimRequest | None = None
        request: int | None = None
        try:
            while parts and self._write_part_claimed(parts[0]):
                del parts[0]
            request = self._begin(parts) if parts else None
            if request is None:
                return
            claim_request = self._claim_policy.make_claim_request(parts[0].request.num_rows)
            target = self._target
            make_outgoing, make_body = self._make_recipe(parts, claim_request, target)
            deadline = find_first_deadline(parts)
            late: list[ExtendPart] = []
            done = write_early(
                self._client,
                make_outgoing,
                make_body,
                request=request,
                deadline=deadline,
                what=parts[0].what,
                on_later=lambda: late.extend(parts),
            )
        except BaseException as fault:
            if claim_request is not None:
                self._claim_policy.take_answer(claim_request, None)
            self._fail_unsent(parts, request, fault)
            if isinstance(fault, TDServeError):
                return
            raise
        with self._lock:
            self._under_way[done] = sum(part.nbytes for part in parts)
            self._opening = done if late else None
        # The future is an argument: a closure over it would keep the future, and the parts with it, alive.
        done.add_done_callback(lambda done: self._settle(done, parts, claim_request, target))

    def _make_recipe(
        self, parts: list[ExtendPart], claim_request: ClaimRequest | None, target: WriteTarget
    ) -> tuple[MakeOutgoing, MakeBody]:
        request = join_requests([part.request for part in parts])
        captured = list(chain.from_iterable(part.captured for part in parts))
        is_first = all(part.number is None and part.is_plain for part in parts)
        paths = captured[0].spec.leaf_paths
        lacks_leaves = target.stored is not None and len(paths) < len(target.stored.leaf_paths)

        def make_outgoing(session: Session) -> Outgoing:
            margin_nbytes = sum(len(column.data) for column in find_columns(request))
            return session.movers.writes.prepare(captured, target, margin_nbytes=margin_nbytes)

        def make_body(session: Session, outgoing: Outgoing, deadline: Deadline) -> dict[str, Any]:
            message = control_pb2.ExtendRequest(content=outgoing.message, timeout_s=deadline.remaining_s)
            message.MergeFrom(request)
            if lacks_leaves and not message.keys:  # captured before the others came
                message.keys.extend(content_pb2.Path(parts=path) for path in paths)
            nonlocal is_first
            if claim_request is not None:
                # A session of another client, to whose server the table has moved, numbers its requests otherwise.
                is_own = session.requests is self._client.requests
                claim_request.session, message.wished_claim = session, claim_request.num_rows if is_own else 0
            elif is_first and not session.movers.writes.takes_claims:
                message.wished_claim = self._claim_policy.compute_wish(request.num_rows)
            is_first = False
            return {"extend": message}

        return make_outgoing, make_body

    def _settle(
        self,
        done: Future[control_pb2.Done],
        parts: list[ExtendPart],
        claim_request: ClaimRequest | None,
        target: WriteTarget,
    ) -> None:
        error = done.exception()
        with self._lock:
            del self._under_way[done]
            late = self._release(error) if self._opening is done else []
        if error is not None:
            fail_parts(late, error)
        if claim_request is not None:
            self._claim_policy.take_answer(claim_request, done.result() if error is None else None)
        if isinstance(error, StructureChangedError):
            self._refuse(parts, target, error)
        elif isinstance(error, (RequestError, CapacityError)) and len(parts) > 1:
            # Refused together, for example because a limiter admits fewer rows at once: sent one by one.
            with self._lock:
                self._waiting.put_back([part._replace(is_alone=True) for part in parts])
        elif error is not None:
            fail_parts(parts, error)
        else:
            self._counts.update(done.result())
            indices = _decode_indices(done.result())
            begin = 0
            for part in parts:
                part.future.set_result(indices[begin : begin + part.request.num_rows])
                begin += part.request.num_rows
        self._go_on()

    def _release(self, error: BaseException | None) -> list[ExtendPart]:
        """Stops waiting for a session. Returns the parts that have failed with it, because their time is over too."""
        self._opening = None
        return [] if error is None else self._waiting.take_out(is_expired)

    def _refuse(self, parts: list[ExtendPart], target: WriteTarget, error: StructureChangedError) -> None:
        """Sends parts again if the table has got leaves since; another thread finds that out."""
        with self._lock:
            is_first = not self._refused
            self._refused += parts
        if is_first:
            try:
                self._client.run_later(partial(self._send_refused, target, error))
            except ClosedError:
                self._end_refused(error)

    def _send_refused(self, target: WriteTarget, error: TDServeError) -> None:
        try:
            if self._target is target:  # else the handle has followed meanwhile
                found = self._client.catalog.describe(target.store)
                stored = found.spec.prepend((found.capacity,))
                if stored.fingerprint == target.fingerprint or found.uid != self._uid:
                    raise error
                self.follow(stored)
        except TDServeError as fault:
            self._end_refused(fault)
        else:
            self._end_refused(None)

    def _end_refused(self, error: TDServeError | None) -> None:
        """Sends the refused parts before all others, or fails them."""
        with self._lock:
            parts, self._refused = self._refused, []
            if error is None:
                self._waiting.put_back(parts)
        if error is not None:
            fail_parts(parts, error)
        self._advance()

    def _list_unfinished(self) -> list[Future[Any]]:
        return [*(part.future for part in (*self._waiting, *self._refused)), *self._under_way]


def _decode_indices(done: control_pb2.Done) -> torch.Tensor:
    return torch.from_numpy(decode_rows(done.indices).copy())
