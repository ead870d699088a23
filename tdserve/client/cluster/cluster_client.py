"""The client of several servers, with the names of the client of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from tdserve.base.deadline import Deadline
from tdserve.base.errors import InvalidRequestError, StoreNotCreatedError, WrongStateError
from tdserve.base.ids import check_store_name
from tdserve.client.client import Client
from tdserve.client.cluster.at_home import at_home
from tdserve.client.cluster.moves.cluster_moves import ClusterMoves
from tdserve.client.cluster.servers.cluster_servers import ClusterRecipe, ClusterServers
from tdserve.client.cluster.servers.placement_records import delete_record
from tdserve.client.cluster.stores.part_creation import delete_parts
from tdserve.client.cluster.stores.sharded_dataset import CreatePart, ShardedDataset, create_sharded_dataset
from tdserve.client.cluster.stores.sharded_keyed import ShardedKeyedHandle, create_sharded_keyed
from tdserve.client.cluster.stores.sharded_store import ShardedStore
from tdserve.client.cluster.sums import add_up_stats
from tdserve.client.cluster.tables.sharded_queue import ShardedQueueHandle
from tdserve.client.cluster.tables.sharded_replay import ShardedReplayHandle
from tdserve.client.cluster.tables.table_creation import create_sharded_table
from tdserve.client.content.outer_modes import leave_modes_in_calls
from tdserve.client.content.row_choice import choose_rows
from tdserve.client.kv.keyed_handle import KeyedHandle
from tdserve.client.session.calls.awaitable_future import AwaitableFuture
from tdserve.client.session.calls.call_deadline import within
from tdserve.client.session.catalog.catalog_client import ONCE, Once
from tdserve.client.session.catalog.description import StoreDescription
from tdserve.client.tables.queue import QueueHandle
from tdserve.client.tables.replay import ReplayHandle
from tdserve.client.tables.row_like import make_row_like
from tdserve.client.weights.pulls import Weights
from tdserve.client.weights.subscription import Subscription
from tdserve.rules.kv.keyed_settings import Eviction
from tdserve.rules.placement import OnShardLoss, PlacementRecord, Shards, choose_servers, find_whole
from tdserve.structure.trees.tree import Path

if TYPE_CHECKING:
    from typing_extensions import Self

_Result = TypeVar("_Result")

MOVING_S = 1.0
"""How long a list of stores looks for one that is being moved; then it counts as there."""


@leave_modes_in_calls
class ClusterClient(ClusterMoves):
    """A connection to several servers, with the calls and handles of :class:`tdserve.Client`.

    Each store has one server, which rendezvous hashing of its name over all servers chooses, alive or not. While its
    port is closed, creating a store of such a name raises ConnectError within a second or two, and calls of its stores
    wait until their timeout, as those of a single server do while it restarts. Tables, queues and keyed stores may be
    shared by several servers: see ``shards`` of ``create_replay``. Threads: safe. Pickled by address. Only servers that
    are used are connected to. One that is dropped ends as a ``Client`` does, at the next garbage collection.
    """

    def __init__(self, cluster: ClusterServers) -> None:
        super().__init__(cluster)
        self.address, self.numpy = cluster.address, cluster.numpy

    def __repr__(self) -> str:
        return f"<ClusterClient of {len(self.members)} servers at {self.address}>"

    def __reduce__(self) -> tuple[object, ...]:
        return (_make_client, (self.cluster.recipe,))

    @property
    def timeout_s(self) -> float:
        """Default of every call that can wait, seconds."""
        return self.cluster.timeout_s

    @timeout_s.setter
    def timeout_s(self, value: float) -> None:
        self.cluster.timeout_s = value
        for client in self.members.used.values():
            client.timeout_s = value

    @property
    def is_closed(self) -> bool:
        """Whether it was closed; every call then raises ClosedError."""
        return self.cluster.is_closed

    def run_later(self, work: Callable[[], _Result], deadline: Deadline = Deadline.never) -> AwaitableFuture[_Result]:
        """Runs work in one of the client's own threads, as in ``BackgroundCalls.run``."""
        return self.cluster.run_later(work, deadline)

    def close(self) -> None:
        """Closes the connections to all servers. Idempotent."""
        self.cluster.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------ all stores

    def stores(self, prefix: str = "") -> list[str]:
        """Lists the names of all stores of the servers that answer, sorted; a shared store once."""
        servers = range(len(self.members))
        asked = self.members.list_alive(servers) or servers
        listed, lost = self.members.ask_clients(asked, lambda client: client.catalog.list_with_moved(prefix))
        if lost and not listed:
            raise next(iter(lost.values()))
        names = {name for here, _ in listed.values() for name in here}
        # A store that moves meanwhile may be nowhere at the time when a server is asked.
        unseen = {name for _, moved in listed.values() for name in moved} - names
        names.update(name for name in unseen if self.directory.has_store(name, Deadline.after(MOVING_S)))
        is_whole = len(listed) == len(self.members)  # otherwise the record of a part may be at a server that is lost
        return sorted(
            name for name in names if (whole := find_whole(name)) is None or (is_whole and whole not in names)
        )

    def get_home(self, name: str) -> Client:
        """Returns the client of the server that has a store, or will have it; of a shared one, its record."""
        return self.members.get(self.directory.find(name).server)

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str):
            return False
        try:
            return self.directory.ask_home(name, lambda client: name in client, self.cluster.make_deadline(None))[0]
        except InvalidRequestError:  # no store can have this name
            return False

    def __iter__(self) -> Iterator[str]:
        return iter(self.stores())

    def __getitem__(self, name: str) -> Any:
        """Returns the handle of a store, by its kind.

        Raises:
            StoreNotFoundError: There is no such store.
        """
        return self._open(name, self.cluster.make_deadline(None))

    def keys(
        self, name: str, include_nested: bool = False, leaves_only: bool = False, *, sort: bool = False
    ) -> list[str | Path]:
        """Lists the keys of a store; see ``Client.keys``."""
        deadline = self.cluster.make_deadline(None)
        opened = self._open(name, deadline)
        if isinstance(opened, ShardedStore):
            return opened.list_part_keys(deadline, include_nested, leaves_only, sort=sort)
        with within(deadline):
            return self.get_home(name).keys(name, include_nested, leaves_only, sort=sort)

    def describe(self, name: str, *, timeout_s: float | Once | None = ONCE) -> StoreDescription:
        """Returns the structure and the figures of a store; of a shared one the sums of its parts."""
        is_awaited = timeout_s is not ONCE
        deadline = self.cluster.make_deadline(timeout_s if timeout_s is not ONCE else None)
        found, place = self.directory.describe(name, deadline, is_awaited=is_awaited)
        if place.placement is None:
            return found
        opened = self._open_shards(name, place.placement, deadline)
        with within(deadline):
            return opened.describe()

    def delete(self, name: str) -> None:
        """Deletes a store, or all parts of a shared one.

        Raises:
            StoreNotFoundError: There is no such store.
            ConnectError: A server that has a part does not answer. Nothing was deleted.
        """
        whole = find_whole(name)
        if whole is not None and whole in self:
            raise InvalidRequestError(argument="store name", reason=f"{name!r} is a part of {whole!r}; delete that")
        with within(self.cluster.make_deadline(None)):
            place = self.directory.find_now(name)
            if place.placement is not None:
                delete_parts(self.members, name, place.placement)
                self.directory.forget(name)
                if name in self:  # its record may be lost with a disk
                    delete_record(self.get_home(name), name)
            else:
                self.get_home(name).delete(name)
        self.directory.forget(name)
        self.cluster.policies.note_change(name)

    def _open(self, name: str, deadline: Deadline, *, is_awaited: bool = False) -> Any:
        found, place = self.directory.describe(name, deadline, is_awaited=is_awaited)
        if place.placement is not None:
            return self._open_shards(name, place.placement, deadline)
        return self.members.get(place.server).open_handle(found)

    def _open_shards(self, name: str, placement: PlacementRecord, deadline: Deadline) -> ShardedStore:
        return _SHARDED[placement.kind](self.cluster, name, placement, deadline=deadline)

    def _open_as(self, kinds: tuple[type[Any], ...], what: str, call: str, name: str, timeout_s: float | None) -> Any:
        opened = self._open(name, self.cluster.make_deadline(timeout_s), is_awaited=True)
        if not isinstance(opened, kinds):
            raise WrongStateError(state=f"store {name!r} is not a {what}", event=f"{call}()")
        return opened

    # ------------------------------------------------------------ tables

    row_like = staticmethod(make_row_like)

    def create_replay(
        self,
        name: str,
        like: Any,
        capacity: int,
        *,
        shards: Shards = 1,
        shard_by: Any = None,
        on_shard_loss: OnShardLoss = "redirect",
        **options: Any,
    ) -> Any:
        """Creates a replay store; other arguments, results and errors as in ``Client.create_replay``.

        Args:
            capacity: Rows of all shards together.
            shards: Servers that share it: a number, or ``"all"``. Each has an equal part of the ring, and of the rows
                that a ``SampleToInsertRatio`` lets wait. Samples are drawn from all of them as from one table.
            shard_by: Key of the rows, whose value chooses the shard: rows of one trajectory or group stay together.
                None: each writer keeps to a shard of its own.
            on_shard_loss: What a writer does while its shard does not answer: ``"redirect"`` writes to another one,
                ``"wait"`` waits until its deadline, ``"raise"`` raises at once. An extend whose outcome is unknown
                always waits for its own shard.
        """
        servers = self._choose_servers(name, shards, options)
        if len(servers) == 1:
            return _create_replay(self, name, like, capacity, **options)
        create = partial(create_sharded_table, self.cluster, "replay", name, like, capacity, servers, options)
        return self._create_table(name, partial(create, shard_by=shard_by, on_shard_loss=on_shard_loss))

    def create_queue(
        self,
        name: str,
        like: Any,
        max_size: int,
        *,
        shards: Shards = 1,
        shard_by: Any = None,
        on_shard_loss: OnShardLoss = "redirect",
        **options: Any,
    ) -> Any:
        """Creates a queue; other arguments, results and errors as in ``Client.create_queue``, and in ``create_replay``
        for what concerns shards.

        The order of a shared queue is that of each shard. Readers take from the shards in proportion to the rows that
        wait there, so a row is overtaken by at most the rows that wait in the other shards when it is written.
        """
        servers = self._choose_servers(name, shards, options)
        if len(servers) == 1:
            return _create_queue(self, name, like, max_size, **options)
        create = partial(create_sharded_table, self.cluster, "queue", name, like, max_size, servers, options)
        return self._create_table(name, partial(create, shard_by=shard_by, on_shard_loss=on_shard_loss))

    def _choose_servers(self, name: str, shards: Shards, options: dict[str, Any]) -> tuple[int, ...]:
        """Returns the servers of a new store; with ``"all"`` those of one that exists and may, since more servers may
        have joined after its creation."""
        servers = choose_servers(name, shards, len(self.members))
        if shards == "all" and (options.get("exists_ok") or options.get("existsok")):
            deadline = self.cluster.make_deadline(options.get("timeout_s"))
            known = self.directory.find_for_creation(name, deadline).placement
            return servers if known is None else known.servers
        return servers

    def _create_table(self, name: str, create: Callable[[], None]) -> Any:
        deadline = self.cluster.make_deadline(None)
        with within(deadline):
            create()
        return self._open(name, deadline, is_awaited=True)

    def replay(self, name: str, *, timeout_s: float | None = None) -> Any:
        """Returns the handle of a replay store; waits for it. See ``Client.replay``."""
        return self._open_as((ReplayHandle, ShardedReplayHandle), "replay", "replay", name, timeout_s)

    def queue(self, name: str, *, timeout_s: float | None = None) -> Any:
        """Returns the handle of a queue; waits for it. See ``Client.queue``."""
        return self._open_as((QueueHandle, ShardedQueueHandle), "queue", "queue", name, timeout_s)

    # ------------------------------------------------------------ keyed stores

    def create_kv(
        self,
        name: str,
        like: Any = None,
        max_bytes: int | None = None,
        eviction: Eviction = "none",
        ttl_s: float | None = None,
        exists_ok: bool = False,
        *,
        shards: Shards = 1,
        existsok: bool = False,
    ) -> Any:
        """Creates a keyed store; arguments, results and errors as in ``Client.create_kv``.

        With ``shards=``, as in ``create_replay``, several servers share it: each key is on the server that its hash
        chooses, and ``max_bytes`` is divided. A call with keys of several servers is atomic on each of them.
        """
        may_exist = exists_ok or existsok
        servers = self._choose_servers(name, shards, {"exists_ok": may_exist})
        if len(servers) == 1:
            return _create_kv(self, name, like, max_bytes, eviction, ttl_s, may_exist)
        with within(self.cluster.make_deadline(None)):
            create_sharded_keyed(self.cluster, name, servers, like, max_bytes, eviction, ttl_s, exists_ok=may_exist)
            return self.kv(name)

    def kv(self, name: str, *, timeout_s: float | None = None) -> Any:
        """Returns the handle of a keyed store; waits for it. See ``Client.kv``."""
        return self._open_as((KeyedHandle, ShardedKeyedHandle), "keyed store", "kv", name, timeout_s)

    # ------------------------------------------------------------ datasets

    def memmap(self, td: Any, name: str, *args: Any, shards: Shards = 1, **options: Any) -> Any:
        """Creates a store from a tensordict; arguments, results and errors as in ``Client.memmap``.

        Args:
            shards: Servers that share it, each with a block of the rows: a number, or ``"all"``.
        """
        servers = self._choose_servers(name, shards, options)
        if len(servers) == 1:
            return _memmap(self, td, name, *args, **options)

        def create(client: Client, part: str, rows: slice) -> None:
            client.memmap(choose_rows(td, rows), part, *args, **{**options, "exists_ok": True})

        return self._create_dataset(name, servers, len(td), create, options)

    save = memmap

    dumps = memmap

    def memmap_like(
        self,
        like: Any,
        name: str,
        *args: Any,
        batch_size: Sequence[int] | int = (),
        shards: Shards = 1,
        **options: Any,
    ) -> Any:
        """Creates a store of zeros; arguments, results and errors as in ``Client.memmap_like``.

        Args:
            shards: Servers that share it, each with a block of the rows: a number, or ``"all"``.
        """
        servers = self._choose_servers(name, shards, options)
        if len(servers) == 1:
            return _memmap_like(self, like, name, *args, batch_size=batch_size, **options)
        sizes = (batch_size,) if isinstance(batch_size, int) else tuple(batch_size)
        if not sizes:
            raise InvalidRequestError(argument="batch_size", reason="required: a shared dataset is divided by rows")

        def create(client: Client, part: str, rows: slice) -> None:
            own = [rows.stop - rows.start, *sizes[1:]]
            client.memmap_like(like, part, *args, batch_size=own, **{**options, "exists_ok": True})

        return self._create_dataset(name, servers, sizes[0], create, options)

    def _create_dataset(
        self, name: str, servers: tuple[int, ...], num_rows: int, create: CreatePart, options: dict[str, Any]
    ) -> Any:
        if options.get("return_early"):
            raise InvalidRequestError(argument="return_early", reason="several servers create a dataset at once")
        exists_ok = bool(options.get("exists_ok") or options.get("existsok"))
        deadline = self.cluster.make_deadline(options.pop("timeout_s", None))
        with within(deadline):
            create_sharded_dataset(self.cluster, name, servers, num_rows, create, exists_ok=exists_ok)
        return self._open(name, deadline, is_awaited=True)

    # ------------------------------------------------------------ stores of one server

    init_remote = at_home(Client.init_remote)
    from_remote_init = at_home(Client.from_remote_init)
    send = at_home(Client.send)
    recv = at_home(Client.recv)
    memmap_ = at_home(Client.memmap_)
    adopt = at_home(Client.adopt)
    load_memmap = at_home(Client.load_memmap)
    load = load_memmap
    load_memmap_ = at_home(Client.load_memmap_)
    load_ = load_memmap_
    latest = at_home(Client.latest)
    wait_newer = at_home(Client.wait_newer)
    version = at_home(Client.version)
    versions = at_home(Client.versions)
    group = at_home(Client.group)

    def subscribe(
        self, name: str, *, newer_than: int | None = None, timeout_s: float | None = None, **options: Any
    ) -> Subscription:
        """Follows some weights; arguments, results and errors as in ``Client.subscribe``. It also goes on with weights
        that were deleted and published again at another server."""
        # No server is asked for this: it refuses arguments that are wrong.
        self.members.get(0).subscribe(check_store_name(name), newer_than=newer_than, **options).close()

        def pull(newer_than: int | None, step: Deadline, _: Deadline) -> Weights | None:
            try:
                with within(step):
                    return self.latest(name, newer_than=newer_than, timeout_s=step.timeout_s, **options)
            except StoreNotCreatedError:  # where it was
                self.directory.forget(name)
                raise

        return Subscription(name, pull, partial(self.cluster.make_deadline, timeout_s), newer_than=newer_than)

    def publish(self, name: str, td: Any, **options: Any) -> Any:
        """Publishes the next version of some weights; arguments, results and errors as in ``Client.publish``.

        Tables on other servers that follow these weights count its number from this client's next call on, and from
        those of other clients a few milliseconds later.
        """
        try:
            published = _publish(self, name, td, **options)
        finally:
            self.cluster.policies.note_change(name)
        if isinstance(published, AwaitableFuture):
            published.add_done_callback(lambda _: self.cluster.policies.note_change(name))
        return published

    def memmap_refresh_(self, td: Any, **options: Any) -> Any:
        """Makes a tensordict from ``memmap_`` show what its store holds now; see ``Client.memmap_refresh_``."""
        failure = WrongStateError(state="the tensordict shows no store of these servers", event="memmap_refresh_()")
        for client in self.members.used.values():
            try:
                return client.memmap_refresh_(td, **options)
            except WrongStateError as error:  # it was not returned by that client
                failure = error
        raise failure

    # ------------------------------------------------------------ figures

    def stats(self) -> dict[str, Any]:
        """Returns figures of the servers that answer, as plain values.

        ``servers`` has those of each, as in ``Client.stats``, by number, and ``lost`` the numbers of the others.
        ``transports``, ``sessions`` and ``workers`` are those of all servers; ``transport`` is this client's, if it is
        the same at all servers that it has used.
        """
        found, lost = self.members.ask_clients(range(len(self.members)), lambda client: client.stats())
        return add_up_stats(self.address, found, lost)


_SHARDED: dict[str, Callable[..., ShardedStore]] = {
    "replay": ShardedReplayHandle,
    "queue": ShardedQueueHandle,
    "keyed": ShardedKeyedHandle,
    "dataset": ShardedDataset,
}
"""Makes the handles of stores that several servers share."""

_create_replay = at_home(Client.create_replay)
_create_queue = at_home(Client.create_queue)
_create_kv = at_home(Client.create_kv)
_publish = at_home(Client.publish)
_memmap, _memmap_like = at_home(Client.memmap), at_home(Client.memmap_like)


def _make_client(recipe: ClusterRecipe) -> ClusterClient:
    return ClusterClient(recipe.make())


def connect_cluster(recipe: ClusterRecipe) -> ClusterClient:
    """Connects to several servers; see ``tdserve.connect``.

    Raises:
        ConnectError: No server listened within the client's timeout, or the source of their list does not answer.
    """
    client = _make_client(recipe)
    try:
        client.members.wait_for_any(client.timeout_s)
    except BaseException:
        client.close()
        raise
    return client
