"""Every call of a client of several servers that takes ``timeout_s``, by the method that it tries."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict

import tdserve
from tdserve.client.cluster.tables.sharded_writer import ShardedWriter
from tdserve.rules.placement import hash_to_shard
from tests.integration.cluster.names import name_owned_by
from tests.integration.timed_calls import Calls, list_signatures

NUM_SERVERS = 2
ROW = TensorDict({"x": torch.zeros(3), "key": torch.tensor(0)}, [])
ROWS = TensorDict({"x": torch.zeros(40, 3), "key": torch.arange(40)}, [40])
KEYS = [next(key for key in "abcdefgh" if hash_to_shard(key.encode(), NUM_SERVERS) == each) for each in (0, 1)]
"""A key of each shard."""

NOT_TRIED = {
    "ClusterClient.create_queue": "has options, and no timeout",
    "ClusterClient.create_replay": "has options, and no timeout",
    "ClusterClient.drain": "rebalances each store",
    "ClusterClient.dumps": "memmap",
    "ClusterClient.load": "load_memmap",
    "ClusterClient.load_": "load_memmap_",
    "ClusterClient.memmap_refresh_": "calls the client of one server",
    "ClusterClient.save": "memmap",
    "ShardedReplayHandle.extend_captured": "what writers call",
    "ShardedReplayHandle.extend_shard": "what writers call",
    "ShardedReplayHandle.writer": "what it makes is tried",
    "ShardedQueueHandle.extend_captured": "what writers call",
    "ShardedQueueHandle.extend_shard": "what writers call",
    "ShardedQueueHandle.writer": "what it makes is tried",
    "ShardedKeyedHandle.update": "puts entries of these names",
    "ShardedWriter.close": "as flush",
}
"""Methods without a case of their own, each with the reason."""

NO_CALLS = ("ask_part", "ask_parts", "ask_each", "get_part", "change_rows", "make_deadline")
"""Methods of handles that are for other parts of the client."""


class SharedStores(NamedTuple):
    """Handles of shared stores, and the names of stores that one server has."""

    dataset: Any
    replay: Any
    by_key: Any
    written: Any
    queue: Any
    entries: Any
    doomed: Any
    plain: tuple[str, ...]
    weights: tuple[str, ...]


def create_shared_stores(client: Any) -> SharedStores:
    """Creates a store of each kind that both servers share, and some of one server each."""
    made = SharedStores(
        client.memmap(ROWS, "dataset", shards="all"),
        client.create_replay("replay", ROW, 400, shards="all", sampler=tdserve.Prioritized()),
        client.create_replay("by-key", ROW, 400, shards="all", shard_by="key"),
        client.create_replay("written", ROW, 400, shards="all", shard_by="key"),
        client.create_queue("queue", ROW, 400, shards="all"),
        client.create_kv("entries", shards="all"),
        client.create_replay("doomed", ROW, 400, shards="all"),
        tuple(name_owned_by(server, NUM_SERVERS) for server in range(NUM_SERVERS)),
        tuple(name_owned_by(server, NUM_SERVERS) for server in range(NUM_SERVERS)),
    )
    for name, weights in zip(made.plain, made.weights, strict=True):
        client.memmap(ROWS, name)
        client.publish(weights, ROW)
    return made


def open_shared_stores(client: Any, made: SharedStores) -> SharedStores:
    """Returns another client's handles, all used before, of stores that have content again."""
    found = made._replace(
        dataset=client["dataset"],
        replay=client.replay("replay"),
        by_key=client.replay("by-key"),
        written=client.replay("written"),
        queue=client.queue("queue"),
        entries=client.kv("entries"),
        doomed=client.replay("doomed"),
    )
    found.dataset[:]
    with suppress(tdserve.DeadlineExceededError), found.queue.take(400, min_rows=1, timeout_s=0):
        pass
    for table in (found.replay, found.queue):
        for writer in (0, _find_other_writer(table)):
            table.extend(ROWS, writer=writer)
    found.by_key.extend(ROWS)
    found.entries.put(KEYS, [ROW] * NUM_SERVERS)
    found.replay.sample(64)
    found.by_key.sample(8)
    found.queue.take(4)
    found.entries.get(KEYS)
    assert len(found.doomed) == 0
    for name, weights in zip(made.plain, made.weights, strict=True):
        client.from_remote_init(name)
        client.latest(weights)
    return found


def make_calls(client: Any, stores: SharedStores, timeout_s: float, folder: Path) -> Calls:
    """Returns every call, by class and method; brackets distinguish several calls of one method.

    Args:
        timeout_s: Timeout of each call.
        folder: For checkpoints; may hold one named "checkpoint".
    """
    calls = {
        **_make_client_calls(client, timeout_s, folder),
        **_make_dataset_calls(stores, timeout_s),
        **_make_replay_calls(stores, timeout_s),
        **_make_queue_calls(stores, timeout_s),
        **_make_keyed_calls(stores, timeout_s),
    }
    for server in range(NUM_SERVERS):
        calls |= _make_calls_at(client, stores, server, timeout_s, folder)
    return calls


def _make_client_calls(client: Any, t: float, folder: Path) -> Calls:
    return {
        "ClusterClient.checkpoint": lambda: client.checkpoint(folder / "made", timeout_s=t),
        "ClusterClient.describe [shared]": lambda: client.describe("replay", timeout_s=t),
        "ClusterClient.kv": lambda: client.kv("entries", timeout_s=t),
        "ClusterClient.memmap [shared]": lambda: client.memmap(
            ROWS, name_owned_by(0, NUM_SERVERS), shards="all", timeout_s=t
        ),
        "ClusterClient.memmap_like [shared]": lambda: client.memmap_like(
            ROW, name_owned_by(1, NUM_SERVERS), batch_size=[40], shards="all", timeout_s=t
        ),
        "ClusterClient.memmap [shared, exists]": lambda: client.memmap(
            ROWS, "dataset", shards="all", exists_ok=True, timeout_s=t
        ),
        "ClusterClient.queue": lambda: client.queue("queue", timeout_s=t),
        "ClusterClient.rebalance [part]": lambda: client.rebalance("dataset#0", 1, timeout_s=t),
        "ClusterClient.replay": lambda: client.replay("replay", timeout_s=t),
        "ClusterClient.restore": lambda: client.restore(folder / "checkpoint", prefix="restored-", timeout_s=t),
    }


def _make_calls_at(client: Any, stores: SharedStores, server: int, t: float, folder: Path) -> Calls:
    """Returns the calls about stores that one server has."""
    plain, weights = stores.plain[server], stores.weights[server]

    def afresh() -> str:
        return name_owned_by(server, NUM_SERVERS)

    calls: Calls = {
        "adopt": lambda: client.adopt(folder / "nothing", afresh(), timeout_s=t),
        "describe": lambda: client.describe(plain, timeout_s=t),
        "from_remote_init": lambda: client.from_remote_init(plain, timeout_s=t),
        "from_remote_init, absent": lambda: client.from_remote_init(afresh(), timeout_s=t),
        "from_remote_init, early": lambda: client.from_remote_init(plain, timeout_s=t, return_early=True).result(),
        "group": lambda: client.group(afresh(), 2, timeout_s=t),
        "init_remote": lambda: client.init_remote(ROW, afresh(), timeout_s=t),
        "latest": lambda: client.latest(weights, timeout_s=t),
        "load_memmap": lambda: client.load_memmap(plain, timeout_s=t),
        "load_memmap_": lambda: client.load_memmap_(ROWS.clone(), plain, timeout_s=t),
        "memmap": lambda: client.memmap(ROWS, afresh(), timeout_s=t),
        "memmap_": lambda: client.memmap_(ROWS.clone(), afresh(), timeout_s=t),
        "memmap_like": lambda: client.memmap_like(ROWS, afresh(), timeout_s=t),
        "publish": lambda: client.publish(weights, ROW, timeout_s=t),
        "rebalance": lambda: client.rebalance(plain, 1 - server, timeout_s=t),
        "recv": lambda: client.recv(ROWS.clone(), plain, timeout_s=t),
        "send": lambda: client.send(ROWS, plain, timeout_s=t),
        "subscribe": lambda: next(iter(client.subscribe(weights, timeout_s=t))),
        "version": lambda: client.version(weights, 1, timeout_s=t),
        "versions": lambda: client.versions(weights, timeout_s=t),
        "wait_newer": lambda: client.wait_newer(weights, newer_than=1_000_000, timeout_s=t),
    }

    def rename(name: str) -> str:
        method, _, more = name.partition(", ")
        return f"ClusterClient.{method} [server {server}{', ' if more else ''}{more}]"

    return {rename(name): call for name, call in calls.items()}


def _make_dataset_calls(stores: SharedStores, t: float) -> Calls:
    dataset = stores.dataset
    return {
        "ShardedDataset.batches": lambda: next(dataset.batches(40, timeout_s=t)),
        "ShardedDataset.get": lambda: dataset.get("x", timeout_s=t),
        "ShardedDataset.get_at": lambda: dataset.get_at("x", [0, 39], timeout_s=t),
        "ShardedDataset.set_at_": lambda: dataset.set_at_("x", torch.ones(2, 3), [0, 39], timeout_s=t),
        "ShardedDataset.to_tensordict": lambda: dataset.to_tensordict(timeout_s=t),
    }


def _make_table_calls(kind: str, table: Any, t: float, options: dict[str, Any]) -> Calls:
    """Returns the calls that replays and queues have in common."""
    wanted = [0, table.part_capacity]

    def take() -> None:
        taken = table.take(8, timeout_s=t, **options)
        taken.ack(timeout_s=t)  # the end of a block has the client's default timeout

    def take_all_batches() -> None:
        with table.batches(8, timeout_s=t, **options) as batches:
            next(batches)

    calls: Calls = {
        "ack": lambda: table.ack(wanted, timeout_s=t, **options),
        "batches": take_all_batches,
        "delete": lambda: table.delete(wanted, timeout_s=t),
        "extend": lambda: table.extend(ROWS, timeout_s=t),
        "extend [another writer]": lambda: table.extend(ROWS, writer=_find_other_writer(table), timeout_s=t),
        "extend [early]": lambda: table.extend(ROWS, timeout_s=t, return_early=True).result(),
        "get_at": lambda: table.get_at("x", wanted, timeout_s=t),
        "get_at [slice]": lambda: table.get_at("x", slice(0, 60), timeout_s=t),
        "get_at [all]": lambda: table.get_at("x", slice(None), timeout_s=t),
        "renew": lambda: table.renew(wanted, 1.0, timeout_s=t, **options),
        "set_at_": lambda: table.set_at_("x", torch.ones(2, 3), wanted, timeout_s=t),
        "set_at_ [early]": lambda: table.set_at_(
            "x", torch.ones(2, 3), wanted, timeout_s=t, return_early=True
        ).result(),
        "set_limiter": lambda: table.set_limiter(table.settings.limiter, timeout_s=t),
        "set_sampler": lambda: table.set_sampler(table.settings.sampler, timeout_s=t),
        "take": take,
        "update_if_present": lambda: table.update_if_present(
            wanted, {"x": torch.ones(2, 3)}, generation=[1, 1], timeout_s=t
        ),
    }
    return {f"{kind}.{name}": call for name, call in calls.items()}


def _find_other_writer(table: Any) -> int:
    own = table.choose_shard(0)
    return next(writer for writer in range(1, 1000) if table.choose_shard(writer) != own)


def _make_replay_calls(stores: SharedStores, t: float) -> Calls:
    replay, by_key, doomed = stores.replay, stores.by_key, stores.doomed
    priorities, wanted = torch.ones(2), [0, replay.part_capacity]

    def draw() -> None:
        with replay.batches(8, timeout_s=t) as batches:
            next(batches)

    def write() -> None:
        writer = stores.written.writer(timeout_s=t)
        for row in ROWS:
            writer.append(row)
        writer.flush(timeout_s=t)

    kind = "ShardedReplayHandle"
    return {
        **_make_table_calls(kind, replay, t, {"consumer": "c"}),
        f"{kind}.add_leaves": lambda: doomed.add_leaves(TensorDict({"late": torch.zeros(1)}), timeout_s=t),
        f"{kind}.batches [drawn]": draw,
        f"{kind}.clear": lambda: doomed.clear(timeout_s=t),
        f"{kind}.close": lambda: doomed.close(timeout_s=t),
        f"{kind}.extend [by key]": lambda: by_key.extend(ROWS, timeout_s=t),
        f"{kind}.extend [by key, early]": lambda: by_key.extend(ROWS, timeout_s=t, return_early=True).result(),
        f"{kind}.forget_draws": lambda: by_key.forget_draws(timeout_s=t),
        f"{kind}.get_priorities": lambda: replay.get_priorities(wanted, timeout_s=t),
        f"{kind}.sample": lambda: replay.sample(64, timeout_s=t),
        f"{kind}.sample [consumer]": lambda: replay.sample(4, consumer="d", timeout_s=t),
        f"{kind}.sample [rank]": lambda: by_key.sample(4, rank=0, world_size=2, timeout_s=t),
        f"{kind}.update_priority": lambda: replay.update_priority(wanted, priorities, timeout_s=t),
        f"{kind}.update_priority [early]": lambda: replay.update_priority(
            wanted, priorities, timeout_s=t, return_early=True
        ).result(),
        "ShardedWriter.flush": write,
    }


def _make_queue_calls(stores: SharedStores, t: float) -> Calls:
    doomed = stores.doomed
    kind = "ShardedQueueHandle"
    return {
        **_make_table_calls(kind, stores.queue, t, {}),
        f"{kind}.add_leaves": lambda: doomed.add_leaves(TensorDict({"later": torch.zeros(1)}), timeout_s=t),
        f"{kind}.clear": lambda: doomed.clear(timeout_s=t),
        f"{kind}.close": lambda: doomed.close(timeout_s=t),
    }


def _make_keyed_calls(stores: SharedStores, t: float) -> Calls:
    entries = stores.entries
    wait_s = max(t, 0.1)  # 0 does not wait for keys, but does wait for a server that is away, as long as the client
    # does
    calls: Calls = {
        "delete": lambda: entries.delete(KEYS, missing_ok=True, timeout_s=t),
        "get": lambda: entries.get(KEYS, timeout_s=wait_s),
        "get_with_versions": lambda: entries.get_with_versions(KEYS, timeout_s=wait_s),
        "pop": lambda: entries.pop(KEYS, timeout_s=wait_s),
        "put": lambda: entries.put(KEYS, [ROW, ROW], timeout_s=t),
        "put [early]": lambda: entries.put(KEYS, [ROW, ROW], timeout_s=t, return_early=True).result(),
    }
    for key in KEYS:
        calls |= {
            f"get [{key}]": lambda key=key: entries.get(key, timeout_s=wait_s),  # type: ignore[misc]
            f"put [{key}]": lambda key=key: entries.put(key, ROW, timeout_s=t),  # type: ignore[misc]
            f"put [{key}, early]": lambda key=key: entries.put(  # type: ignore[misc]
                key, ROW, timeout_s=t, return_early=True
            ).result(),
            f"pop [{key}]": lambda key=key: entries.pop(key, timeout_s=wait_s),  # type: ignore[misc]
            f"delete [{key}]": lambda key=key: entries.delete(key, missing_ok=True, timeout_s=t),  # type: ignore[misc]
        }
    return {f"ShardedKeyedHandle.{name}": call for name, call in calls.items()}


def list_methods() -> Iterator[str]:
    """Lists the methods with ``timeout_s``, or with options, by class and name."""
    classes: tuple[type, ...] = (
        tdserve.ClusterClient,
        tdserve.ShardedDataset,
        tdserve.ShardedReplayHandle,
        tdserve.ShardedQueueHandle,
        tdserve.ShardedKeyedHandle,
        ShardedWriter,
    )
    for name, signature in list_signatures(classes):
        is_timed = any(
            each.name == "timeout_s" or each.kind is each.VAR_KEYWORD for each in signature.parameters.values()
        )
        if is_timed and name.partition(".")[2] not in NO_CALLS:
            yield name
