"""Tables whose rows are made by versions of a policy: they get the number of the newest version when they need it.

A table needs it whenever rows come, are drawn with a maximum lag, or the table is described. So a publish costs nothing
here, except that waiting callers look again: rows that are too old now make room in a queue. Of a policy on another
server, of which this one knows nothing, the table's clients say it with their requests.
"""

from __future__ import annotations

from tdserve.base.errors import CorruptDataError, InvalidRequestError, WrongStateError
from tdserve.rules.catalog import StoreRecord
from tdserve.rules.replay.eligibility.staleness import Staleness
from tdserve.rules.replay.settings import Settings
from tdserve.server.execution.turns import drop_references
from tdserve.server.kinds.placement_kind import find_forward
from tdserve.server.kinds.store_kind import KindStores
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.v1 import control_pb2


def check_policy(stores: KindStores, record: StoreRecord) -> None:
    """Checks that a table's policy can be one; it need not exist yet.

    Raises:
        InvalidRequestError: The table is its own policy.
        WrongStateError: The store of this name is not a weights store.
    """
    policy = Settings.from_json(record.settings).policy
    if policy == record.name:
        raise InvalidRequestError(argument="policy", reason=f"{policy!r} is the table itself")
    weights = find_weights(stores, policy) if policy else None
    if weights is not None:
        weights.get_versions()


def find_weights(stores: KindStores, policy: str) -> OpenedStore | None:
    """Returns the store of a policy; None if this server has none, perhaps since it has moved to another."""
    found = stores.find(policy)
    return None if found is None or find_forward(found.record) is not None else found


def refresh_staleness(stores: KindStores, store: OpenedStore) -> Staleness | None:
    """Makes a table follow the newest version of its policy, and returns the policy versions of its rows.

    Returns:
        The table's policy versions; None for a table without a policy.

    Raises:
        WrongStateError: The store is not a replay, or the policy's store is not a weights store.
    """
    table = store.get_table()
    policy = table.settings.policy
    if not policy:
        return None
    staleness, weights = table.selectors.staleness, find_weights(stores, policy)
    if staleness is None:
        return None
    if weights is not None:
        newest = weights.get_versions().newest
        staleness.remote_since_s = None
        former = weights.record.former_version
        follow(stores, store, weights.record.uid, newest.version if newest is not None else 0, former)
    elif staleness.remote_since_s is None:
        if stores.find(policy) is None:
            follow(stores, store, "", 0)
        else:
            staleness.remote_since_s = 0.0  # it has moved
    if table.selectors.dropped:
        drop_references(table.selectors.dropped, num_rows=store.record.capacity)
    stores.followers.setdefault(policy, set()).add(store.name)
    return staleness


def follow(stores: KindStores, store: OpenedStore, uid: str, newest: int, former: int = 0) -> None:
    """Sets the newest version of a table's policy; arguments as in ``Staleness.follow``. That it is another policy is
    recorded at once: after a restart the rows would else be those of the one before."""
    table = store.get_table()
    known = table.selectors.staleness
    is_other = known is not None and known.uid != uid
    table.selectors.follow(uid, newest, former)
    if is_other:
        with stores.db.begin_transaction(is_decided=True) as txn:
            stores.save_state(store, txn, store.get_table_state())


def end_following(stores: KindStores, store: OpenedStore) -> None:
    """Has a store that is being deleted woken no more; does nothing for one that is no table."""
    policy = store.table.settings.policy if store.table is not None else ""
    followers = stores.followers.get(policy, set())
    followers.discard(store.name)
    if not followers:
        stores.followers.pop(policy, None)


def wake_followers(stores: KindStores, policy: str) -> None:
    """Wakes callers that wait for a table of this policy: a version was published, or all are gone."""
    for name in tuple(stores.followers.get(policy, ())):
        store = stores.find(name)
        if store is None:
            stores.followers[policy].discard(name)
        else:
            store.waiters.wake()


def describe_policy(stores: KindStores, store: OpenedStore, description: control_pb2.StoreDescription) -> None:
    """Adds a table's policy figures to its description. A damaged or wrong store with the policy's name is no error."""
    try:
        staleness = refresh_staleness(stores, store)
    except (CorruptDataError, WrongStateError):
        staleness = store.get_table().selectors.staleness
    if staleness is None:
        return
    description.newest_policy_version = staleness.newest
    description.num_discarded = staleness.num_discarded
    lags = staleness.measure_lags()
    if lags is not None:
        description.lags.min, description.lags.mean, description.lags.max = lags
