"""Asks a shard of a table what may be drawn from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tdserve.base.deadline import Deadline
from tdserve.client.session.calls.timeouts import compute_answer_timeout_s
from tdserve.client.session.session import Session
from tdserve.client.session.session_client import SessionClient
from tdserve.client.tables.draws.query import Query
from tdserve.client.tables.table_policy import add_policy_news
from tdserve.rules.shard_division import ShardMass


def ask_mass(part: Any, make_query: Callable[[Any], Query], num_rows: int, deadline: Deadline) -> ShardMass:
    """Asks a shard, with one message each way.

    Args:
        part: Handle of the shard.
        make_query: Makes the query of the sample for it.
        num_rows: Rows of the whole sample: the length of slices may follow from it.
    """

    def ask() -> ShardMass:
        return _ask(part._client, make_query(part), num_rows, deadline)

    found: ShardMass = part.follow_and_retry(ask, deadline, uses_rows=False)
    return found


def _ask(client: SessionClient, query: Query, num_rows: int, deadline: Deadline) -> ShardMass:
    def attempt(session: Session, request: int, deadline: Deadline) -> ShardMass:
        message = query.make_message(num_rows, 1, deadline.remaining_s)
        add_policy_news(message, client, query.policy)
        message.asks_mass, message.is_plain = True, False  # a worker draws, and knows no masses
        pending = session.send(request, sample=message)
        done = pending.wait(compute_answer_timeout_s(deadline), f"what may be drawn from {query.name!r}").done
        counts = done.counts
        return ShardMass(
            mass=done.mass,
            least=done.least_mass,
            num_epochs=done.num_epochs,
            num_drawable=done.num_drawable,
            is_final=done.is_final,
            num_rows=counts.rows,
            inserts=counts.inserts,
            missing=done.missing,
            num_draws=done.num_draws,
        )

    return client.call(attempt, deadline)
