"""Asks a shard of a table what may be drawn from it."""

from __future__ import annotations

from tdserve.base.deadline import Deadline
from tdserve.client.session.session import Session
from tdserve.client.session.session_client import SessionClient
from tdserve.client.session.timeouts import compute_answer_timeout_s
from tdserve.client.tables.row_annotations import add_policy_news
from tdserve.client.tables.sampling import Query
from tdserve.rules.shard_division import ShardMass


def ask_mass(client: SessionClient, query: Query, num_rows: int, deadline: Deadline) -> ShardMass:
    """Asks a shard, with one message each way.

    Args:
        num_rows: Rows of the whole sample; a slice of the right length can then be counted.
    """

    def attempt(session: Session, request: int, deadline: Deadline) -> ShardMass:
        message = query.make_message(num_rows, 1, deadline.remaining_s)
        add_policy_news(message, client, query.policy)
        message.asks_mass, message.is_plain = True, False  # a worker draws, and knows no masses
        pending = session.send(request, sample=message)
        done = pending.wait(compute_answer_timeout_s(deadline), f"what may be drawn from {query.name!r}").done
        return ShardMass(done.mass, done.least_mass, done.num_epochs, done.counts.rows, done.counts.inserts)

    return client.call(attempt, deadline)
