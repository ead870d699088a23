"""The policy of a table: its newest version, and how much older than that the version of a row may be."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np

from tdserve.base.deadline import Deadline
from tdserve.base.errors import CorruptDataError, InvalidRequestError, WrongStateError
from tdserve.base.integers import LARGEST, to_integer
from tdserve.client.session.calls.timeouts import compute_answer_timeout_s
from tdserve.client.session.session import Session
from tdserve.client.session.session_client import SessionClient
from tdserve.messages.content import POLICY_VERSION_KEY
from tdserve.rules.replay.settings import Settings
from tdserve.v1 import control_pb2


def add_policy_news(
    request: control_pb2.ExtendRequest | control_pb2.SampleRequest, client: SessionClient, policy: str
) -> None:
    """Adds what the client knows of a table's policy, if it may be on another server than the table."""
    given = request.policy_versions.data if isinstance(request, control_pb2.ExtendRequest) else b""
    news = client.catalog.find_policy(policy, int(np.frombuffer(given, "<i8").max(initial=0))) if policy else None
    if news is not None:
        request.policy_news.CopyFrom(news)


def check_policy(settings: Settings, store: str, argument: str) -> None:
    """Raises InvalidRequestError if a table has no policy."""
    if not settings.policy:
        raise InvalidRequestError(argument=argument, reason=f"table {store!r} was created without a policy")


def check_policy_version(version: Any) -> int:
    """Returns ``version`` if it is an integer of at least 0. Raises InvalidRequestError."""
    number = to_integer(version)
    if number is None or not 0 <= number <= LARGEST:
        raise InvalidRequestError(argument=POLICY_VERSION_KEY, reason=f"{version!r} is not an integer from 0 on")
    return number


def parse_max_lag(max_lag: Any, settings: Settings, store: str) -> int | None:
    """Returns ``max_lag`` if a sample of this table may use it.

    Raises:
        InvalidRequestError: It is not an integer of at least 0, or the table has no policy.
    """
    if max_lag is None:
        return None
    number = to_integer(max_lag)
    if number is None or not 0 <= number <= LARGEST:
        raise InvalidRequestError(argument="max_lag", reason=f"{max_lag!r} is not an integer from 0 on")
    check_policy(settings, store, "max_lag")
    return number


def ask_versions_in_time(
    client: SessionClient,
    table: str,
    policy: str,
    max_lag: int,
    deadline: Deadline,
    *,
    kind: control_pb2.StoreKind,
) -> range:
    """Requests the range of versions of a table's policy that lag by at most ``max_lag``; one message each way.

    Args:
        kind: Kind of the table that is meant.
    """

    def attempt(session: Session, request: int, deadline: Deadline) -> range:
        asked = control_pb2.SampleRequest(store=table, asks_newest=True, max_lag=max_lag, kind=kind)
        add_policy_news(asked, client, policy)
        pending = session.send(request, sample=asked)
        answer = pending.wait(compute_answer_timeout_s(deadline), f"the newest version of the policy of {table!r}")
        return range(answer.done.oldest_policy_version, answer.done.newest_policy_version + 1)

    return client.call(attempt, deadline, store=table)


def report_policy(client: SessionClient, table: str, policy: str, *, kind: control_pb2.StoreKind) -> None:
    """Reports to a table's server what the client knows of the policy, if it may be on another server, before a request
    that has no place for that. Arguments as in ``ask_versions_in_time``."""
    if policy and client.catalog.find_policy(policy, 0) is not None:
        with suppress(CorruptDataError, WrongStateError):  # the policy's name is one of something else
            ask_versions_in_time(client, table, policy, 0, client.make_deadline(None), kind=kind)


def find_oldest_version(batch: Any) -> int:
    """Returns the oldest policy version of a sampled batch."""
    return int(batch.get(POLICY_VERSION_KEY).min())
