"""The policy versions of requests: those that made an extend's rows, the greatest lag of a sample, and what the client
knows of a policy on another server."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from tdserve.base.errors import InvalidRequestError
from tdserve.base.ids import MAX_TEXT_BYTES
from tdserve.rules.replay.eligibility.staleness import LARGEST_VERSION, UNKNOWN
from tdserve.rules.replay.plans import Arrival
from tdserve.server.catalog.stores import Stores
from tdserve.server.kinds.policies import find_weights, follow, refresh_staleness
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.tables.arrivals import ExtendColumns
from tdserve.v1 import control_pb2


def check_max_lag(store: OpenedStore, asked: control_pb2.SampleRequest) -> int | None:
    """Returns the maximum lag of a sample; None if it has none.

    Raises:
        InvalidRequestError: The table has no policy.
    """
    if not asked.HasField("max_lag"):
        return None
    if not store.get_table().settings.policy:
        raise InvalidRequestError(argument="max_lag", reason=f"table {store.name!r} was created without a policy")
    return asked.max_lag


def adopt_reported_policy(
    stores: Stores, store: OpenedStore, asked: control_pb2.ExtendRequest | control_pb2.SampleRequest
) -> None:
    """Takes over what a request reports about the table's policy. Does nothing if this server has the policy.

    Raises:
        InvalidRequestError: No policy can have the reported version, uid or time.
        WrongStateError: As in :func:`refresh_staleness`.
    """
    if not asked.HasField("policy_news"):
        return
    news = asked.policy_news
    if news.newest > LARGEST_VERSION or len(news.uid) > MAX_TEXT_BYTES or not math.isfinite(news.created_s):
        raise InvalidRequestError(argument="policy_news", reason="no policy has such a version, uid or time")
    staleness = refresh_staleness(stores, store)
    if staleness is None or find_weights(stores, store.get_table().settings.policy) is not None:
        return
    known, newest = staleness.uid, news.newest
    is_outdated = news.created_s < (staleness.remote_since_s or 0.0) if news.uid else news.gone != known
    if news.uid == known:
        newest = max(newest, staleness.newest)
    elif is_outdated:  # it is about a policy that the known one has replaced
        return
    staleness.remote_since_s = news.created_s if news.uid else None
    if (news.uid, newest) == (known, staleness.newest):
        return
    follow(stores, store, news.uid, newest)
    refresh_staleness(stores, store)
    store.waiters.wake()


class ExtendPolicyVersions:
    """The policy versions that made an extend's rows: read when it begins, settled when it is committed.

    Raises:
        InvalidRequestError: The table has no policy, the number of versions is not that of the rows, or a version is
            above the newest.
        WrongStateError: As in :func:`refresh_staleness`.
    """

    def __init__(
        self, stores: Stores, store: OpenedStore, asked: control_pb2.ExtendRequest, columns: ExtendColumns
    ) -> None:
        adopt_reported_policy(stores, store, asked)
        self._stores = stores
        self._store = store
        self._versions = columns.versions
        staleness = refresh_staleness(stores, store)
        self._uid = "" if staleness is None else staleness.uid
        if self._versions is None:
            return
        if staleness is None:
            reason = f"table {store.name!r} was created without a policy"
            raise InvalidRequestError(argument="policy_version", reason=reason)
        low, high = columns.version_range
        if low < 0 or high > staleness.newest:
            policy = store.get_table().settings.policy
            reason = f"{low if low < 0 else high} is not from 0 to {staleness.newest}, the newest of {policy!r}"
            raise InvalidRequestError(argument="policy_version", reason=reason)

    def settle(self, arrival: Arrival) -> Arrival:
        """Adds the versions, as of now. If the policy was deleted meanwhile, they are unknown."""
        staleness = refresh_staleness(self._stores, self._store)
        if staleness is None:
            return arrival
        versions = self._versions
        if versions is not None and self._uid and staleness.uid != self._uid:
            versions = np.broadcast_to(np.int64(UNKNOWN), len(versions))
        return replace(arrival, policy_versions=versions)
