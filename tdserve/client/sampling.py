"""Samples: rows drawn by the server, received, and mended where a row was overwritten while it was copied."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tdserve.client.calls import SessionClient, answer_timeout_s, tag_of
from tdserve.client.incoming import Posted, post
from tdserve.client.reading import Content, finish_read, on_cpu
from tdserve.client.session import Pending, Session
from tdserve.content import GENERATION_KEY, INDEX_KEY, rows_layout
from tdserve.deadline import Deadline
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
    """

    def __init__(self, content: Content) -> None:
        self.spec = _with_added_keys(content.spec)
        self.tensors: dict[Path, torch.Tensor] = content.received.leaves()
        self.tensors[(INDEX_KEY,)] = content.received.trailing(INDEX_KEY)
        self.tensors[(GENERATION_KEY,)] = content.received.trailing(GENERATION_KEY)
        self.values = content.values

    @property
    def missing(self) -> torch.Tensor:
        """Positions of rows that were overwritten while they were copied; their content is undefined."""
        return (self.tensors[(GENERATION_KEY,)] < 0).nonzero().flatten()

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
        pending: Where an answer arrives, if one is due.
        posted: The receives under way, where the client knows beforehand what comes.
    """

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
    """Begins to receive a sample, where it is known what comes, and sends the request for it."""
    expected = _expected(session, stored, num_rows * num_batches)
    layout = rows_layout(stored, num_rows * num_batches)
    posted = post(layout, session, tag_of(request), client.pool) if expected else None
    asked = control_pb2.SampleRequest(
        store=name,
        num_rows=num_rows,
        num_batches=num_batches,
        timeout_s=deadline.remaining_s,
        fingerprint=stored.fingerprint,
        message_nbytes=expected,
    )
    return Asked(session.send(request, sample=asked), posted)


def _expected(session: Session, stored: Spec, total: int) -> tuple[int, ...]:
    """The messages to wait for without an answer first; none when the content may be inline or has values."""
    message_nbytes = rows_layout(stored, total).message_nbytes
    return message_nbytes if not stored.values and sum(message_nbytes) > session.welcome.inline_bytes else ()


def take(
    client: SessionClient,
    session: Session,
    request: int,
    asked: Asked,
    *,
    stored: Spec,
    total: int,
    what: str,
    deadline: Deadline,
) -> Sampled:
    """Receives the rows that ``ask`` asked for, after the answer where there is one."""
    pending, posted = asked
    answer = None if posted is not None else pending.wait(answer_timeout_s(deadline), what)
    content = finish_read(
        client,
        session,
        request,
        pending,
        answer=answer,
        spec=on_cpu(stored.with_rows(total)),
        layout=rows_layout(stored, total),
        deadline=deadline,
        posted=posted,
    )
    return Sampled(content)


def sampled(
    client: SessionClient, name: str, stored: Spec, num_rows: int, *, num_batches: int, deadline: Deadline
) -> Sampled:
    """Draws rows, all of them whole."""
    total = num_rows * num_batches

    def attempt(session: Session, request: int, deadline: Deadline) -> Sampled:
        asked = ask(client, session, request, name, stored, num_rows, num_batches=num_batches, deadline=deadline)
        what = f"a sample of {name!r}"
        return take(client, session, request, asked, stored=stored, total=total, what=what, deadline=deadline)

    return mended(client, name, stored, client.call(attempt, deadline), deadline)


def mended(client: SessionClient, name: str, stored: Spec, rows: Sampled, deadline: Deadline) -> Sampled:
    """Draws other rows for those that a writer overwrote while they were copied: seldom, and few."""
    missing = rows.missing
    if len(missing):
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
