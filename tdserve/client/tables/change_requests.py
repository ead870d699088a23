"""Changes of a table that have no content: priorities, deletions, limiters, acknowledgements."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tdserve.base.deadline import Deadline
from tdserve.client.session.calls.timeouts import compute_answer_timeout_s
from tdserve.client.session.session import Session
from tdserve.client.session.session_client import SessionClient
from tdserve.client.tables.row_arguments import to_generations, to_priorities, to_row_numbers
from tdserve.messages.row_numbers import Rows, encode_few_bytes, encode_rows
from tdserve.v1 import control_pb2

MAX_MESSAGE_ROWS = 1 << 17
"""Rows whose priorities are in one message, of a megabyte: a larger message would occupy the server's event loop."""


def change(
    client: SessionClient,
    name: str,
    deadline: Deadline,
    *,
    kind: control_pb2.StoreKind,
    prepare: Callable[[Session], None] | None = None,
    **body: Any,
) -> control_pb2.Done:
    """Requests a change of a table, which is carried out once even if it is retried.

    Args:
        kind: Kind of the table that is meant.
        prepare: Called before each attempt, with its session: it may change the body.
        **body: One change of ChangeRequest, and its further fields.
    """

    def attempt(session: Session, request: int, deadline: Deadline) -> control_pb2.Done:
        if prepare is not None:
            prepare(session)
        asked = control_pb2.ChangeRequest(store=name, timeout_s=deadline.remaining_s, kind=kind, **body)
        pending = session.send(request, change=asked)
        return pending.wait(compute_answer_timeout_s(deadline), f"a change of {name!r}").done

    return client.call(attempt, deadline, request=client.requests.begin_change(), store=name)


def change_priorities(
    client: SessionClient,
    name: str,
    deadline: Deadline,
    messages: Sequence[control_pb2.Priorities],
    *,
    kind: control_pb2.StoreKind,
    capacity: int = 0,
) -> int:
    """Changes the priorities of rows; returns how many of them were skipped.

    Args:
        kind: As in ``change``.
        capacity: As in ``ChangeRequest``.
        messages: From ``encode_priorities``. All of them are checked before the first one changes anything.
    """
    if len(messages) > 1:
        for message in messages:
            message.checks_only = True
            change(client, name, deadline, kind=kind, capacity=capacity, priorities=message)
        for message in messages:
            message.checks_only, message.is_checked = False, True
    return sum(
        change(client, name, deadline, kind=kind, capacity=capacity, priorities=message).num_skipped
        for message in messages
    )


def encode_priorities(rows: Any, priority: Any, generation: Any) -> list[control_pb2.Priorities]:
    """Encodes new priorities of rows, ``MAX_MESSAGE_ROWS`` in each message.

    Args:
        rows: As for ``to_row_numbers``; a batch contains its generations.
        priority: One per row, or one for all.
        generation: Generation of each row, if ``rows`` is not a batch.

    Raises:
        InvalidRequestError: The numbers of rows, priorities or generations differ, or a priority is invalid.
    """
    numbers = to_row_numbers(rows)
    priorities = np.minimum(to_priorities(priority, len(numbers)), np.finfo(np.float32).max).astype("<f4")
    generations = to_generations(rows, generation, len(numbers))

    def make_message(part: slice) -> control_pb2.Priorities:
        return control_pb2.Priorities(
            rows=encode_few_bytes(numbers[part]),
            priorities=(priorities if len(priorities) == 1 else priorities[part]).tobytes(),
            generations=(generations if len(generations) == 1 else generations[part]).tobytes(),
        )

    begins = range(0, max(len(numbers), 1), MAX_MESSAGE_ROWS)
    return [make_message(slice(begin, begin + MAX_MESSAGE_ROWS)) for begin in begins]


def encode_deletion(rows: Any, generation: Any) -> dict[str, Any]:
    """Returns the fields of ``change`` that delete rows; arguments and errors as in ``encode_priorities``."""
    numbers = to_row_numbers(rows)
    generations = to_generations(rows, generation, len(numbers))
    if not len(generations):
        return {"delete": control_pb2.Rows(data=encode_rows(numbers))}
    # Not as runs, which must not be longer than the table: a sample may name a row many times.
    named = control_pb2.Rows(data=encode_few_bytes(numbers))
    return {"delete": named, "delete_generations": control_pb2.RowColumn(data=generations.tobytes())}


def ask_priorities(
    client: SessionClient,
    table: str,
    numbers: NDArray[np.int64],
    deadline: Deadline,
    *,
    kind: control_pb2.StoreKind,
    capacity: int = 0,
) -> NDArray[np.float32]:
    """Returns the priorities of rows; errors as in ``ReplayHandle.get_priorities``."""
    answers = _ask_of_rows(client, table, kind, numbers, deadline, "priorities", capacity)
    found = [np.frombuffer(done.priorities, "<f8").astype(np.float32) for done in answers]
    return np.concatenate([np.zeros(0, np.float32), *found])


def ask_sequences(
    client: SessionClient, table: str, numbers: Rows, deadline: Deadline, *, kind: control_pb2.StoreKind
) -> Rows:
    """Returns the sequences of rows; see ``TableHandle.find_sequences``."""
    answers = _ask_of_rows(client, table, kind, numbers, deadline, "sequences")
    found: Rows = np.concatenate([np.zeros(0, np.int64), *(np.frombuffer(done.sequences, "<i8") for done in answers)])
    return found


def _ask_of_rows(
    client: SessionClient,
    table: str,
    kind: control_pb2.StoreKind,
    numbers: NDArray[np.int64],
    deadline: Deadline,
    what: str,
    capacity: int = 0,
) -> Iterator[control_pb2.Done]:
    """Yields the answers to what is asked of rows, by the name of the field, without a draw."""
    for begin in range(0, len(numbers), MAX_MESSAGE_ROWS):
        asked = control_pb2.SampleRequest(store=table, kind=kind, capacity=capacity)
        setattr(asked, f"{what}_of", encode_few_bytes(numbers[begin : begin + MAX_MESSAGE_ROWS]))

        def attempt(
            session: Session, request: int, deadline: Deadline, asked: control_pb2.SampleRequest = asked
        ) -> control_pb2.Done:
            pending = session.send(request, sample=asked)
            return pending.wait(compute_answer_timeout_s(deadline), f"{what} of {table!r}").done

        yield client.call(attempt, deadline, store=table)
