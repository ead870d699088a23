"""Tables whose rows are made by versions of a policy: they get the number of the newest version when they need it.

A table needs it whenever rows come, are drawn with a maximum lag, or the table is described. So a publish costs nothing
here, except that waiting callers look again: rows that are too old now make room in a queue.
"""

from __future__ import annotations

from typing import Protocol

from tdserve.base.errors import CorruptDataError, InvalidRequestError, WrongStateError
from tdserve.rules.catalog import StoreRecord
from tdserve.rules.replay.settings import Settings
from tdserve.rules.replay.staleness import Staleness
from tdserve.server.opened_store import OpenedStore
from tdserve.server.turns import drop_references
from tdserve.v1 import control_pb2


class PolicyStores(Protocol):
    """What is used of all stores here; see the methods of ``Stores``.

    Attributes:
        followers: By name of a weights store: names of the tables that follow its versions and have been used.
    """

    followers: dict[str, set[str]]

    def find(self, name: str) -> OpenedStore | None:
        """Returns the visible store of this name. Raises CorruptDataError."""


def check_policy(stores: PolicyStores, record: StoreRecord) -> None:
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


def follow(stores: PolicyStores, store: OpenedStore) -> Staleness | None:
    """Sets the newest version of a table's policy in the table.

    Returns:
        The table's policy versions; None for a table without a policy.

    Raises:
        WrongStateError: The store is not a replay, or the policy's store is not a weights store.
    """
    table = store.get_table()
    policy = table.settings.policy
    if not policy:
        return None
    weights = stores.find(policy)
    newest = None if weights is None else weights.get_versions().newest
    uid = "" if weights is None else weights.record.uid
    table.selectors.follow(uid, newest.version if newest is not None else 0)
    if table.selectors.dropped:
        drop_references(table.selectors.dropped, num_rows=store.record.capacity)
    stores.followers.setdefault(policy, set()).add(store.name)
    return table.selectors.staleness


def wake_followers(stores: PolicyStores, policy: str) -> None:
    """Wakes callers that wait for a table of this policy: a version was published, or all are gone."""
    for name in tuple(stores.followers.get(policy, ())):
        store = stores.find(name)
        if store is None:
            stores.followers[policy].discard(name)
        else:
            store.waiters.wake()


def describe_policy(stores: PolicyStores, store: OpenedStore, description: control_pb2.StoreDescription) -> None:
    """Adds a table's policy figures to its description. A damaged or wrong store with the policy's name is no error."""
    try:
        staleness = follow(stores, store)
    except (CorruptDataError, WrongStateError):
        staleness = store.get_table().selectors.staleness
    if staleness is None:
        return
    description.newest_policy_version = staleness.newest
    description.num_discarded = staleness.num_discarded
    lags = staleness.measure_lags()
    if lags is not None:
        description.lags.min, description.lags.mean, description.lags.max = lags
