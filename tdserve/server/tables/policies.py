"""Tables whose rows are made by versions of a policy: they get the number of the newest version when they need it.

A table needs it whenever rows come, are drawn with a maximum lag, or the table is described. So a publish costs nothing
here, except that waiting callers look again: rows that are too old now make room in a queue.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tdserve.base.errors import CorruptDataError, InvalidRequestError, WrongStateError
from tdserve.rules.catalog import StoreRecord
from tdserve.rules.replay.plans import Arrival
from tdserve.rules.replay.settings import Settings
from tdserve.rules.replay.staleness import UNKNOWN, Staleness
from tdserve.server.opened_store import OpenedStore
from tdserve.server.stores import Stores
from tdserve.server.tables.arrivals import Coming
from tdserve.server.turns import drop_references
from tdserve.v1 import control_pb2


def check_policy(stores: Stores, record: StoreRecord) -> None:
    """Checks that a table's policy can be one; it need not exist yet.

    Raises:
        InvalidRequestError: The table is its own policy.
        WrongStateError: The store of this name is not a weights store.
    """
    policy = Settings.from_json(record.settings).policy
    if policy == record.name:
        raise InvalidRequestError(argument="policy", reason=f"{policy!r} is the table itself")
    weights = stores.find(policy) if policy else None
    if weights is not None:
        weights.get_versions()


def follow(stores: Stores, entry: OpenedStore) -> Staleness | None:
    """Sets the newest version of a table's policy in the table.

    Returns:
        The table's policy versions; None for a table without a policy.

    Raises:
        WrongStateError: The store is not a replay, or the policy's store is not a weights store.
    """
    table = entry.get_table()
    policy = table.settings.policy
    if not policy:
        return None
    weights = stores.find(policy)
    newest = None if weights is None else weights.get_versions().newest
    uid = "" if weights is None else weights.record.uid
    table.selectors.follow(uid, newest.version if newest is not None else 0)
    if table.selectors.dropped:
        drop_references(table.selectors.dropped, num_rows=entry.record.capacity)
    stores.followers.setdefault(policy, set()).add(entry.name)
    return table.selectors.staleness


def wake_followers(stores: Stores, policy: str) -> None:
    """Wakes callers that wait for a table of this policy: a version was published, or all are gone."""
    for name in tuple(stores.followers.get(policy, ())):
        entry = stores.find(name)
        if entry is None:
            stores.followers[policy].discard(name)
        else:
            entry.waiters.wake()


def check_max_lag(entry: OpenedStore, asked: control_pb2.SampleRequest) -> int | None:
    """Returns the maximum lag of a sample; None if it has none.

    Raises:
        InvalidRequestError: The table has no policy.
    """
    if not asked.HasField("max_lag"):
        return None
    if not entry.get_table().settings.policy:
        raise InvalidRequestError(argument="max_lag", reason=f"table {entry.name!r} was created without a policy")
    return asked.max_lag


class MadeBy:
    """The policy versions that made an extend's rows: read when it begins, settled when it is committed.

    Raises:
        InvalidRequestError: The table has no policy, the number of versions is not that of the rows, or a version is
            above the newest.
        WrongStateError: As in :func:`follow`.
    """

    def __init__(self, stores: Stores, entry: OpenedStore, coming: Coming) -> None:
        self._stores = stores
        self._entry = entry
        self._versions = coming.versions
        staleness = follow(stores, entry)
        self._uid = "" if staleness is None else staleness.uid
        if self._versions is None:
            return
        if staleness is None:
            reason = f"table {entry.name!r} was created without a policy"
            raise InvalidRequestError(argument="policy_version", reason=reason)
        low, high = coming.version_range
        if low < 0 or high > staleness.newest:
            policy = entry.get_table().settings.policy
            reason = f"{low if low < 0 else high} is not from 0 to {staleness.newest}, the newest of {policy!r}"
            raise InvalidRequestError(argument="policy_version", reason=reason)

    def settle(self, arrival: Arrival) -> Arrival:
        """Adds the versions, as of now. If the policy was deleted meanwhile, they are unknown."""
        staleness = follow(self._stores, self._entry)
        if staleness is None:
            return arrival
        versions = self._versions
        if versions is not None and self._uid and staleness.uid != self._uid:
            versions = np.broadcast_to(np.int64(UNKNOWN), len(versions))
        return replace(arrival, policy_versions=versions)


def describe_policy(stores: Stores, entry: OpenedStore, description: control_pb2.StoreDescription) -> None:
    """Adds a table's policy figures to its description. A damaged or wrong store with the policy's name is no error."""
    try:
        staleness = follow(stores, entry)
    except (CorruptDataError, WrongStateError):
        staleness = entry.get_table().selectors.staleness
    if staleness is None:
        return
    description.newest_policy_version = staleness.newest
    description.num_discarded = staleness.num_discarded
    lags = staleness.measure_lags()
    if lags is not None:
        description.lags.min, description.lags.mean, description.lags.max = lags
