"""Samples: rows that the server draws, received here; rows that were overwritten since are replaced."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from tdserve.base.deadline import Deadline
from tdserve.base.errors import CorruptDataError, TDServeError, TransferAbortedError
from tdserve.client.content.padding import Pad, pad_ragged
from tdserve.client.content.read_content import Content, on_cpu
from tdserve.client.session.calls.timeouts import compute_answer_timeout_s, may_expect
from tdserve.client.session.requests.client_mover import ClientMover, WantedRows
from tdserve.client.session.requests.pending import Pending, Reply
from tdserve.client.session.requests.request_numbers import RequestNumbers
from tdserve.client.session.session import Session
from tdserve.client.session.session_client import SessionClient
from tdserve.client.tables.draws.share import Share
from tdserve.client.tables.table_policy import add_policy_news
from tdserve.client.transfers.download import Posted, post_known_size
from tdserve.client.transfers.read import finish_known_size
from tdserve.messages.content import (
    ADDED_DTYPES,
    COLUMN_BITS,
    GENERATION_KEY,
    INDEX_KEY,
    SLICE_END_KEY,
    make_rows_layout,
)
from tdserve.messages.layout import Layout
from tdserve.rules.tags import make_tag
from tdserve.structure.building.array_views import to_arrays
from tdserve.structure.building.build import build
from tdserve.structure.stacks.elements import with_one_value
from tdserve.structure.tensors.independent_views import make_independent_views
from tdserve.structure.tensors.torch_types import to_indexable
from tdserve.structure.trees.tree import Path, Spec, TensorLeaf, quote
from tdserve.v1 import content_pb2, control_pb2

_TRUNCATED = ("next", "truncated")


@dataclass(frozen=True)
class Query:
    """Which rows of a table to draw; arguments as in ``ReplayHandle.sample``.

    Attributes:
        name: Name of the store.
        stored: Its structure, beginning with the capacity.
        kind: Its kind; unspecified: either kind of table.
        policy: Name of the weights that have made the rows; "" without one.
        added: Columns that are added to the rows.
        is_exact: Whether exactly the requested number of rows comes.
        is_plain: Whether it has no condition, and each live row has the same probability: no decision of the server is
            needed.
        is_ordered: Whether the order of the rows matters.
        pad: Padding of ragged tensors.
        device: Where the rows will be moved.
        replaces_torn: Whether they replace rows that were overwritten while they were copied.
        is_numpy: Whether they are handed over as NumPy arrays.
        share: The part of one rank in a draw for several; None: a draw of its own.
        whole_rows: With slices, rows of the sample of which several servers draw a part each; 0: this is all of it.
        awaits_done: Whether it is over only when the server says so: until then the server may draw rows that leave
            with it again after a crash.
        min_rows: On lease, from how many rows on fewer come than are asked for; 0: all.
        lease_s: How long the lease lasts; 0.0: as long as the session.
    """

    name: str
    stored: Spec
    added: tuple[str, ...] = ()
    require: tuple[Path, ...] | None = None
    consumer: str = ""
    group_by: Path | None = None
    group_size: int = 0
    max_lag: int | None = None
    policy: str = ""
    is_lease: bool = False
    is_exact: bool = True
    is_plain: bool = False
    is_ordered: bool = False
    pad: Pad = None
    device: Any = None
    replaces_torn: bool = False
    is_numpy: bool = False
    share: Share | None = None
    whole_rows: int = 0
    awaits_done: bool = False
    min_rows: int = 0
    lease_s: float = 0.0
    kind: control_pb2.StoreKind = control_pb2.STORE_KIND_UNSPECIFIED

    def describe_conditions(self) -> list[str]:
        """Returns what it asks of a row, for errors."""
        found = [f"have {quote(path)}" for path in self.require or ()]
        if self.group_by is not None:
            found.append(f"are in a group of {self.group_size} rows by {quote(self.group_by)}")
        if self.consumer:
            found.append(f"were not had by consumer {self.consumer!r}")
        if self.max_lag is not None:
            found.append(f"are at most {self.max_lag} versions old")
        if self.is_lease:
            found.append("are not on lease")
        return ["have all leaves", *found] if found and self.require is None else found

    def make_message(self, num_rows: int, num_batches: int, timeout_s: float | None) -> control_pb2.SampleRequest:
        """Makes the request for batches of ``num_rows``."""
        message = control_pb2.SampleRequest(
            store=self.name,
            num_rows=num_rows,
            num_batches=num_batches,
            timeout_s=timeout_s,
            fingerprint=self.stored.fingerprint,
            consumer=self.consumer,
            group_size=self.group_size,
            is_lease=self.is_lease,
            accepts_partial=self.require == (),
            max_lag=self.max_lag,
            is_plain=self.is_plain,
            replaces_torn=self.replaces_torn,
            added=sum(map(COLUMN_BITS.__getitem__, self.added)),
            share=None if self.share is None else self.share.make_message(),
            whole_rows=self.whole_rows,
            awaits_done=self.awaits_done,
            min_rows=self.min_rows,
            lease_s=self.lease_s,
            kind=self.kind,
        )
        if self.require:
            message.require.extend(content_pb2.Path(parts=path) for path in self.require)
        if self.group_by is not None:
            message.group_by.parts.extend(self.group_by)
        return message

    def make_wanted(self) -> WantedRows:
        """Returns how the mover reads its rows."""
        return WantedRows(
            self.name,
            self.stored,
            added=self.added,
            keeps_fault=self.is_lease,
            device=self.device,
            kind=self.kind,
        )

    def hand_over(self, rows: Any) -> Any:
        """Returns rows in the form that the caller asked for."""
        return to_arrays(rows) if self.is_numpy else rows

    def make_layout(self, num_rows: int) -> Layout:
        """Returns the layout of this many rows."""
        return make_rows_layout(self.stored, num_rows, self.added)


class LeaseGrant(NamedTuple):
    """What has taken rows on lease.

    Attributes:
        request: The number of the request.
        numbers: Request numbers of the client that made it: a client of another server uses the same ones for others.
    """

    request: int
    numbers: RequestNumbers


RenewQuery = Callable[[Query, Deadline], "Query | None"]
"""Returns a query for a table that has got leaves since the given one was made; None if it has not. It asks the server,
within a deadline."""


class Sampled:
    """Rows of one or several batches, in order.

    Attributes:
        spec: Their structure, with the added keys.
        tensors: Every leaf by path, including added keys.
        values: Non-tensor values by path.
        num_torn: Rows that were overwritten while they were copied.
        grant: The request that took them on lease; None: unknown, or not on lease.
    """

    grant: LeaseGrant | None = None

    def __init__(self, content: Content, query: Query) -> None:
        received = content.columns
        self.tensors = content.leaves  # not copied: the content of a sample has no other reader
        shown = (INDEX_KEY, GENERATION_KEY, *query.added)
        if SLICE_END_KEY in query.added:
            has_flag = _TRUNCATED in self.tensors
            if has_flag:
                self.tensors[_TRUNCATED][received.get_trailing(SLICE_END_KEY)] = True
            if has_flag or SLICE_END_KEY in dict(content.spec.root.entries):
                shown = tuple(name for name in shown if name != SLICE_END_KEY)
        self.spec = _with_added_keys(content.spec, shown)
        self.tensors.update({(name,): received.get_trailing(name) for name in shown})
        self.values = content.values
        self._pad = query.pad
        self._stored = query.stored
        self._fault = content.fault
        self.num_torn = received.num_torn

    @property
    def missing(self) -> torch.Tensor:
        """Returns the positions of rows that were overwritten while they were copied; their content is undefined."""
        generations = self.tensors[(GENERATION_KEY,)].numpy()
        return torch.from_numpy(np.flatnonzero(generations < 0))

    def replace(self, positions: torch.Tensor, rows: Sampled) -> None:
        """Puts other rows at these positions."""
        for path, tensor in self.tensors.items():
            to_indexable(tensor)[positions] = to_indexable(rows.tensors[path])
        for path, values in self.values.items():
            for position, value in zip(positions.tolist(), rows.values[path], strict=True):
                values[position] = value

    def build(self) -> Any:
        """Builds the tensordict of all rows; its leaves are views of one buffer.

        Raises:
            NotSupportedError, RemoteProtocolError: Values of rows on lease cannot be decoded.
        """
        if self._fault is not None:
            raise self._fault
        values = with_one_value(self.values, self.spec, self._stored)
        return build(*pad_ragged(self.spec, self.tensors, values, self._pad))

    def split(self, num_rows: int) -> list[Any]:
        """Builds the tensordicts of batches of ``num_rows`` rows, as views of one buffer."""
        total = self.spec.batch_size[0]
        if total == num_rows:
            return [self.build()]
        spec = self.spec.with_rows(num_rows)
        firsts = range(0, total, num_rows)
        columns = self.tensors.values()
        parts = make_independent_views(lambda: [part for column in columns for part in torch.split(column, num_rows)])
        is_per_row = {path: leaf.per_row for path, leaf in self.spec.values}
        whole = with_one_value(self.values, self.spec, self._stored)
        batches = []
        for number, first in enumerate(firsts):
            values = {
                path: column[first : first + num_rows] if is_per_row[path] else column for path, column in whole.items()
            }
            tensors = dict(zip(self.tensors, parts[number :: len(firsts)], strict=True))
            batches.append(build(*pad_ragged(spec, tensors, values, self._pad)))
        return batches

    def move_rows(self, offset: int) -> Sampled:
        """Returns these rows with a number added to all row numbers: the table is a part of a larger one."""
        moved = copy(self)
        moved.tensors = {**self.tensors, (INDEX_KEY,): self.tensors[(INDEX_KEY,)] + offset}
        return moved

    @classmethod
    def join(cls, parts: Sequence[Sampled], order: torch.Tensor | None) -> Sampled:
        """Joins rows of tables of the same structure. A leaf that only some of the tables have got so far is left out.

        Args:
            parts: At least one. Of several, none keeps what it has.
            order: Position of each row of the result among the rows of all parts; None keeps them as they are.
        """
        if len(parts) == 1:
            return parts[0]
        kept = min(parts, key=lambda part: len(part.spec.leaf_paths))
        kept.spec = _find_common(kept, parts).with_rows(sum(part.spec.batch_size[0] for part in parts))
        faults = [part._fault for part in parts if part._fault is not None]
        kept._fault = faults[0] if faults else None
        kept.num_torn = sum(part.num_torn for part in parts)
        tensors, values = kept.tensors, kept.values
        kept.tensors, kept.values = {}, {}
        for path, _ in kept.spec.tensors:
            joined = torch.cat([tensors[path] if part is kept else part.tensors[path] for part in parts])
            # An index takes other threads even for few rows: on a busy machine they spin for milliseconds.
            kept.tensors[path] = joined if order is None else joined.index_select(0, order)
        for path, leaf in kept.spec.values:
            kept.values[path] = values[path]
            if leaf.per_row:
                found = [value for part in parts for value in (values if part is kept else part.values)[path]]
                kept.values[path] = found if order is None else [found[number] for number in order.tolist()]
        return kept


def _find_common(narrowest: Sampled, parts: Sequence[Sampled]) -> Spec:
    """Returns the structure of the narrowest of some parts, without leaves that another lacks."""
    spec = narrowest.spec
    if all(part._stored.fingerprint == narrowest._stored.fingerprint for part in parts):
        return spec
    common = set(spec.leaf_paths).intersection(*(part.spec.leaf_paths for part in parts))
    return spec if len(common) == len(spec.leaf_paths) else spec.select([p for p in spec.leaf_paths if p in common])


def build_rows(content: Content, stored: Spec, pad: Pad = None) -> Any:
    """Builds the tensordict of rows that were read from a table of this structure, padded."""
    values = with_one_value(content.values, content.spec, stored)
    return (content if values is content.values else replace(content, values=values)).build(pad=pad)


class Asked(NamedTuple):
    """A sample that was requested.

    Attributes:
        message: The request.
        pending: Receives the answer, if there will be one. None: the client will draw the rows itself.
        posted: The receives under way, if the client knows the content's size beforehand.
    """

    message: control_pb2.SampleRequest
    pending: Pending | None
    posted: Posted | None


def ask(
    client: SessionClient,
    session: Session,
    request: int,
    query: Query,
    num_rows: int,
    *,
    num_batches: int,
    deadline: Deadline,
) -> Asked:
    """Sends the request for a sample, if one is needed; starts to receive if the size of the content is known."""
    if query.is_plain and session.mover.draws_rows:
        return Asked(query.make_message(num_rows, num_batches, deadline.remaining_s), None, None)
    expected = _expect_messages(session, query, num_rows * num_batches) if may_expect(deadline) else ()
    message = query.make_message(num_rows, num_batches, deadline.remaining_s)
    add_policy_news(message, client, query.policy)
    message.message_nbytes.extend(expected)
    if not expected:
        on_announced = session.mover.make_early_receiver(request, query.make_wanted)
        return Asked(message, session.send(request, on_announced=on_announced, sample=message), None)
    pending = session.send(request, content_channel=session.content_channel, sample=message)
    # After the request: a receive wakes the server's process too, which takes longer than the request itself.
    layout = query.make_layout(num_rows * num_batches)
    return Asked(
        message, pending, post_known_size(layout, session, pending, make_tag(request), client.pool, device=query.device)
    )


def _expect_messages(session: Session, query: Query, total: int) -> tuple[int, ...]:
    """Returns the sizes of the messages that can be received without an answer before them.

    Returns () if the content may be inline or has values.
    """
    mover = session.mover
    if not mover.receives_messages or session.is_renewing or query.stored.values or not query.is_exact:
        return ()
    message_nbytes = query.make_layout(total).message_nbytes
    return message_nbytes if sum(message_nbytes) > mover.inline_bytes else ()


def receive_sample(
    client: SessionClient,
    session: Session,
    request: int,
    asked: Asked,
    *,
    query: Query,
    deadline: Deadline,
    is_over: Callable[[], bool] = lambda: False,
) -> Sampled:
    """Receives the rows of a request; waits if none are granted yet.

    Args:
        is_over: Whether to stop waiting.
    """
    message, pending, posted = asked
    stored = query.stored
    total = message.num_rows * message.num_batches
    content = None
    if pending is None:
        content = _draw_here(session.mover, query, total)
    elif posted is not None:
        spec, layout = on_cpu(stored.with_rows(total)), query.make_layout(total)
        content = finish_known_size(session, pending, posted, spec=spec, layout=layout, deadline=deadline)
    if content is not None:
        if query.awaits_done and pending is not None:
            _wait_done(pending, query, deadline)
        return Sampled(content, query)
    if pending is None or posted is not None:
        if is_over():
            raise TransferAbortedError(transfer=request, reason="the wait was cancelled before rows were granted")
        pending = _ask_again(session, request, message, query, deadline)
        if is_over():  # checked after asking: end() either saw this request, or is seen here
            session.cancel(request)
    answer = pending.wait(compute_answer_timeout_s(deadline), f"a sample of {message.store!r}")
    reply = Reply(request, pending, answer, deadline)
    rows = Sampled(session.mover.take_rows(reply, query.make_wanted()), query)
    if query.awaits_done and answer.HasField("accepted") and not answer.accepted.wants_written:
        _wait_done(pending, query, deadline)
    if rows.num_torn and query.share is not None:  # nothing replaces them: others have the same rows
        raise TransferAbortedError(transfer=request, reason="rows were written while they were copied")
    return rows


def _wait_done(pending: Pending, query: Query, deadline: Deadline) -> None:
    pending.wait(compute_answer_timeout_s(deadline), f"the end of a sample of {query.name!r}")


def _ask_again(
    session: Session, request: int, message: control_pb2.SampleRequest, query: Query, deadline: Deadline
) -> Pending:
    """Asks for an answer before the content: that wait can be interrupted, and has no fixed length."""
    waiting = control_pb2.SampleRequest()
    waiting.CopyFrom(message)
    waiting.ClearField("message_nbytes")
    waiting.timeout_s = deadline.remaining_s or 0.0
    on_announced = session.mover.make_early_receiver(request, query.make_wanted)
    return session.send(request, on_announced=on_announced, sample=waiting)


def draw_whole_rows(
    client: SessionClient, query: Query, num_rows: int, *, num_batches: int, deadline: Deadline
) -> Sampled:
    """Draws rows, and replaces those that were overwritten since."""
    rows = _draw(client, query, num_rows, num_batches, deadline)
    return replace_torn(client, query, rows, deadline, num_rows=num_rows)


def _draw(client: SessionClient, query: Query, num_rows: int, num_batches: int, deadline: Deadline) -> Sampled:
    if query.is_plain and (found := _draw_without_request(client, query, num_rows * num_batches)) is not None:
        return found

    def attempt(session: Session, request: int, deadline: Deadline) -> Sampled:
        asked = ask(client, session, request, query, num_rows, num_batches=num_batches, deadline=deadline)
        return receive_sample(client, session, request, asked, query=query, deadline=deadline)

    return client.call(attempt, deadline, store=query.name)


def _draw_here(mover: ClientMover, query: Query, num_rows: int) -> Content | None:
    return mover.draw_rows(query.make_wanted(), num_rows, is_counted=not query.replaces_torn)


def _draw_without_request(client: SessionClient, query: Query, num_rows: int) -> Sampled | None:
    """Draws rows in this process; None if that is not possible, or fails: a request gets the reason.

    Raises:
        CorruptDataError: A row is damaged. A request would draw others, and hide that.
    """
    client.catalog.check_usable()
    mover = client.mover
    if mover is None or not mover.draws_rows:
        return None
    begun_s = time.perf_counter()
    try:
        content = _draw_here(mover, query, num_rows)
    except CorruptDataError as error:
        client.count_call("sample", begun_s, store=query.name, num_rows=num_rows, code=error.code)
        raise
    except TDServeError:
        return None
    if content is None:
        return None
    client.count_call("sample", begun_s, store=query.name, num_rows=num_rows)
    return Sampled(content, query)


def replace_torn(client: SessionClient, query: Query, rows: Sampled, deadline: Deadline, *, num_rows: int) -> Sampled:
    """Draws replacements for rows that a writer overwrote while they were copied, which are few and rare.

    Rows that belong together (slices, groups) are all drawn again, in batches of ``num_rows``.
    """
    if not rows.num_torn:
        return rows
    query = replace(query, replaces_torn=True)
    is_together = query.group_by is not None or SLICE_END_KEY in query.added
    while len(missing := rows.missing):
        if is_together:
            rows = _draw(client, query, num_rows, max(1, rows.spec.batch_size[0] // num_rows), deadline)
        else:
            rows.replace(missing, _draw(client, query, len(missing), 1, deadline))
    return rows


def _with_added_keys(spec: Spec, names: tuple[str, ...]) -> Spec:
    added: Spec | None = spec.memo.get(("sampled", names))
    if added is None:
        columns = tuple((name, TensorLeaf(ADDED_DTYPES.get(name, "int64"), (spec.batch_size[0],))) for name in names)
        # A tensorclass has no fields for the added keys: a sample of one is a plain tensordict.
        root = spec.root._replace(entries=(*spec.root.entries, *columns), tensorclass=None)
        added = spec.memo["sampled", names] = Spec(root)
    return added
