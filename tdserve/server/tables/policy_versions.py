"""The policy versions of requests: those that made an extend's rows, and the greatest lag of a sample."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tdserve.base.errors import InvalidRequestError
from tdserve.rules.replay.plans import Arrival
from tdserve.rules.replay.staleness import UNKNOWN
from tdserve.server.opened_store import OpenedStore
from tdserve.server.policies import PolicyStores, follow
from tdserve.server.tables.arrivals import Coming
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


class MadeBy:
    """The policy versions that made an extend's rows: read when it begins, settled when it is committed.

    Raises:
        InvalidRequestError: The table has no policy, the number of versions is not that of the rows, or a version is
            above the newest.
        WrongStateError: As in :func:`follow`.
    """

    def __init__(self, stores: PolicyStores, store: OpenedStore, coming: Coming) -> None:
        self._stores = stores
        self._store = store
        self._versions = coming.versions
        staleness = follow(stores, store)
        self._uid = "" if staleness is None else staleness.uid
        if self._versions is None:
            return
        if staleness is None:
            reason = f"table {store.name!r} was created without a policy"
            raise InvalidRequestError(argument="policy_version", reason=reason)
        low, high = coming.version_range
        if low < 0 or high > staleness.newest:
            policy = store.get_table().settings.policy
            reason = f"{low if low < 0 else high} is not from 0 to {staleness.newest}, the newest of {policy!r}"
            raise InvalidRequestError(argument="policy_version", reason=reason)

    def settle(self, arrival: Arrival) -> Arrival:
        """Adds the versions, as of now. If the policy was deleted meanwhile, they are unknown."""
        staleness = follow(self._stores, self._store)
        if staleness is None:
            return arrival
        versions = self._versions
        if versions is not None and self._uid and staleness.uid != self._uid:
            versions = np.broadcast_to(np.int64(UNKNOWN), len(versions))
        return replace(arrival, policy_versions=versions)
