"""Samples: rows drawn by the server, received, and mended where a row was overwritten while it was copied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from tdserve.client.calls import SessionClient, answer_timeout_s
from tdserve.client.incoming import Posted, post
from tdserve.client.reading import Content, finish_posted, finish_read, on_cpu
from tdserve.client.session import Pending, Session
from tdserve.content import GENERATION_KEY, INDEX_KEY, rows_layout
from tdserve.deadline import Deadline
from tdserve.errors import TransferAbortedError
from tdserve.session import tag_of
from tdserve.spec.build import build
from tdserve.spec.torch_types import indexable
from tdserve.spec.tree import Path, Spec, TensorLeaf
from tdserve.v1 import control_pb2


class Sampled:
    """Rows of one or several batches, one after the other.

    Attributes:
        spec: Their structure, with the added keys.
        tensors: Every leaf by path, added keys too.
        values: Non-tensor values by path.
        num_missing: Rows that were overwritten while they were copied.
    """

    def __init__(self, content: Content) -> None:
        self.spec = _with_added_keys(content.spec)
        self.tensors: dict[Path, torch.Tensor] = content.received.leaves()
        self.tensors[(INDEX_KEY,)] = content.received.trailing(INDEX_KEY)
        self.tensors[(GENERATION_KEY,)] = content.received.trailing(GENERATION_KEY)
        self.values = content.values
        self.num_missing = content.received.num_missing

    @property
    def missing(self) -> torch.Tensor:
        """Positions of rows that were overwritten while they were copied; their content is undefined."""
        generations = self.tensors[(GENERATION_KEY,)].numpy()
        return torch.from_numpy(np.flatnonzero(generations < 0))

    def replace(self, positions: torch.Tensor, rows: Sampled) -> None:
        """Puts other rows in their places."""
        for path, tensor in self.tensors.items():
            indexable(tensor)[positions] = indexable(rows.tensors[path])
        for path, values in self.values.items():
            for position, value in zip(positions.tolist(), rows.values[path], strict=True):
                values[position] = value

    def build(self) -> Any:
        """The tensordict of all rows; its leaves are views of one buffer."""
        return build(self.spec, self.tensors, self.values)

    def split(self, num_rows: int) -> list[Any]:
        """The tensordicts of the batches, each of ``num_rows`` rows, as views."""
        total = self.spec.batch_size[0]
        if total == num_rows:
            return [self.build()]
        if self.values:
            return list(self.build().split(num_rows))
        spec = self.spec.with_rows(num_rows)
        paths = list(self.tensors)
        pieces = zip(*(torch.split(tensor, num_rows) for tensor in self.tensors.values()), strict=True)
        return [build(spec, dict(zip(paths, piece, strict=True)), {}) for piece in pieces]


class Asked(NamedTuple):
    """A sample that was asked for.

    Attributes:
        message: The request.
        pending: Where an answer arrives, if one is due.
        posted: The receives under way, where the client knows beforehand what comes.
    """

    message: control_pb2.SampleRequest
    pending: Pending
    posted: Posted | None


def ask(
    client: SessionClient,
    session: Session,
    request: int,
    name: str,
    stored: Spec,
    num_rows: int,
    *,
    num_batches: int,
    deadline: Deadline,
) -> Asked:
    """Sends the request for a sample, and begins to receive it where it is known what comes."""
    expected = _expected(session, stored, num_rows * num_batches)
    message = control_pb2.SampleRequest(
        store=name,
        num_rows=num_rows,
        num_batches=num_batches,
        timeout_s=deadline.remaining_s,
        fingerprint=stored.fingerprint,
        message_nbytes=expected,
    )
    pending = session.send(request, sample=message)
    if not expected:
        return Asked(message, pending, None)
    # Behind the request: to begin a receive wakes the server's process too, which takes longer than the request itself.
    layout = rows_layout(stored, num_rows * num_batches)
    return Asked(message, pending, post(layout, session, tag_of(request), client.pool))


def _expected(session: Session, stored: Spec, total: int) -> tuple[int, ...]:
    """The messages to wait for without an answer first; none when the content may be inline or has values."""
    message_nbytes = rows_layout(stored, total).message_nbytes
    return message_nbytes if not stored.values and sum(message_nbytes) > session.inline_bytes else ()


def take(
    client: SessionClient,
    session: Session,
    request: int,
    asked: Asked,
    *,
    stored: Spec,
    deadline: Deadline,
    is_over: Callable[[], bool] = lambda: False,
) -> Sampled:
    """Receives the rows that ``ask`` asked for; when there are none yet, waits for them.

    Args:
        is_over: Whether the wait is to be given up.
    """
    message, pending, posted = asked
    total = message.num_rows * message.num_batches
    spec, layout = on_cpu(stored.with_rows(total)), rows_layout(stored, total)
    if posted is not None:
        content = finish_posted(session, pending, posted, spec=spec, layout=layout, deadline=deadline)
        if content is not None:
            return Sampled(content)
        if is_over():
            raise TransferAbortedError(transfer=request, reason="nothing was granted yet, and nobody waits any more")
        pending = _ask_again(session, request, message, deadline)
        if is_over():  # looked at after asking: whoever gives up either saw this request, or was seen here
            session.cancel(request)
    answer = pending.wait(answer_timeout_s(deadline), f"a sample of {message.store!r}")
    content = finish_read(client, session, request, pending, answer=answer, spec=spec, layout=layout, deadline=deadline)
    return Sampled(content)


def _ask_again(session: Session, request: int, message: control_pb2.SampleRequest, deadline: Deadline) -> Pending:
    """Asks for an answer before the content: that wait can be interrupted, and lasts as long as it must."""
    waiting = control_pb2.SampleRequest()
    waiting.CopyFrom(message)
    waiting.ClearField("message_nbytes")
    waiting.timeout_s = deadline.remaining_s or 0.0
    return session.send(request, sample=waiting)


def sampled(
    client: SessionClient, name: str, stored: Spec, num_rows: int, *, num_batches: int, deadline: Deadline
) -> Sampled:
    """Draws rows, all of them whole."""

    def attempt(session: Session, request: int, deadline: Deadline) -> Sampled:
        asked = ask(client, session, request, name, stored, num_rows, num_batches=num_batches, deadline=deadline)
        return take(client, session, request, asked, stored=stored, deadline=deadline)

    return mended(client, name, stored, client.call(attempt, deadline), deadline)


def mended(client: SessionClient, name: str, stored: Spec, rows: Sampled, deadline: Deadline) -> Sampled:
    """Draws other rows for those that a writer overwrote while they were copied: seldom, and few."""
    if rows.num_missing:
        missing = rows.missing
        rows.replace(missing, sampled(client, name, stored, len(missing), num_batches=1, deadline=deadline))
    return rows


def _with_added_keys(spec: Spec) -> Spec:
    added: Spec | None = spec.memo.get("sampled")
    if added is None:
        column = TensorLeaf("int64", (spec.batch_size[0],))
        entries = (*spec.root.entries, (INDEX_KEY, column), (GENERATION_KEY, column))
        # A tensorclass has no fields for them: what is sampled of one is a plain tensordict.
        added = spec.memo["sampled"] = Spec(spec.root._replace(entries=entries, tensorclass=None))
    return added
