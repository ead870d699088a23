"""Every call of a client that takes ``timeout_s``, by the method that it tries."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict

import tdserve
from tdserve.client.tables.writers.writer import ReplayWriter

ROW = TensorDict({"x": torch.zeros(3), "y": torch.zeros(2000)}, [])
ROWS = ROW.expand(300).clone()
SMALL = TensorDict({"x": torch.zeros(3)}, [])
FEW = SMALL.expand(8).clone()
TEXTS = TensorDict({"x": torch.zeros(8, 3), "t": "text"}, [8])

MANY = torch.arange(300).repeat(400)
"""So many row numbers do not fit into a socket's buffers."""

Calls = dict[str, Callable[[], object]]

_NUMBERS = itertools.count()

NOT_TRIED = {
    "Client.make_deadline": "makes a deadline",
    "Client.group": "waits for other members; tried without any",
    "Client.memmap_refresh_": "as load_memmap_, for what memmap_ has returned",
    "ReplayHandle.extend_captured": "what extend calls",
    "QueueHandle.extend_captured": "what extend calls",
    "StoreHandle.make_memmap_from_storage": "as make_memmap_from_tensor",
    "ReplayWriter.close": "as flush",
}
"""Methods without a case of their own, each with the reason."""


class Handles(NamedTuple):
    """One handle of each kind, each of which was used once."""

    store: Any
    texts: Any
    replay: Any
    uniform: Any
    queue: Any
    entries: Any
    doomed_store: Any
    doomed_replay: Any
    doomed_queue: Any


def create_stores(client: tdserve.Client) -> None:
    """Creates a store of each kind."""
    client.memmap(ROWS, "store")
    client.memmap(TEXTS, "texts")
    client.create_replay("replay", ROW, 1000, sampler=tdserve.Prioritized()).extend(ROWS)
    client.create_replay("uniform", SMALL, 1000).extend(FEW)
    client.create_queue("queue", SMALL, 1000).extend(SMALL.expand(500).clone())
    client.create_kv("entries").put(["a", "b", "c"], [ROW, "text", ROW])
    client.memmap(FEW, "doomed-store")
    client.create_replay("doomed-replay", SMALL, 1000).extend(FEW)
    client.create_queue("doomed-queue", SMALL, 1000)
    client.publish("weights", ROW)
    client.publish("published-once", ROW)


def open_handles(client: tdserve.Client) -> Handles:
    """Returns handles of the stores that ``create_stores`` has created."""
    replay, uniform = client.replay("replay"), client.replay("uniform")
    found = Handles(
        client["store"],
        client["texts"],
        replay,
        uniform,
        client.queue("queue"),
        client.kv("entries"),
        client["doomed-store"],
        client.replay("doomed-replay"),
        client.queue("doomed-queue"),
    )
    found.store[0]
    found.texts[0]
    replay.sample(256)
    uniform.sample(4)
    found.queue.take(1)
    found.entries.get("a")
    return found


def name_afresh() -> str:
    """Returns a name that nothing has yet."""
    return f"fresh-{next(_NUMBERS)}"


def make_leaf() -> TensorDict:
    """Returns a row of one leaf that no table has."""
    return TensorDict({name_afresh(): torch.zeros(1)})


def make_calls(client: tdserve.Client, handles: Handles, timeout_s: float, folder: Path) -> Calls:
    """Returns every call, by class and method; brackets distinguish several calls of one method.

    Args:
        timeout_s: Timeout of each call.
        folder: For checkpoints; may hold one named "checkpoint".
    """
    t = timeout_s
    return {
        **_make_client_calls(client, t, folder),
        **_make_store_calls(handles, t),
        **_make_table_calls(handles, t),
        **_make_queue_calls(handles, t),
        **_make_keyed_calls(handles, t),
    }


def _make_client_calls(client: tdserve.Client, t: float, folder: Path) -> Calls:
    return {
        "Client.adopt": lambda: client.adopt(folder / "nothing", name_afresh(), timeout_s=t),
        "Client.checkpoint": lambda: client.checkpoint(str(folder / name_afresh()), timeout_s=t),
        "Client.describe": lambda: client.describe("store", timeout_s=t),
        "Client.dumps": lambda: client.dumps(SMALL, name_afresh(), timeout_s=t),
        "Client.from_remote_init": lambda: client.from_remote_init("store", timeout_s=t),
        "Client.from_remote_init [early]": lambda: client.from_remote_init(
            "store", timeout_s=t, return_early=True
        ).result(),
        "Client.group [alone]": lambda: client.group(name_afresh(), 2, timeout_s=t),
        "Client.init_remote": lambda: client.init_remote(ROW, name_afresh(), timeout_s=t),
        "Client.init_remote [early]": lambda: client.init_remote(
            ROWS, name_afresh(), timeout_s=t, return_early=True
        ).result(),
        "Client.kv": lambda: client.kv("entries", timeout_s=t),
        "Client.latest": lambda: client.latest("weights", timeout_s=t),
        "Client.load": lambda: client.load("store", timeout_s=t),
        "Client.load_": lambda: client.load_(ROWS.clone(), "store", timeout_s=t),
        "Client.load_memmap": lambda: client.load_memmap("store", timeout_s=t),
        "Client.load_memmap_": lambda: client.load_memmap_(ROWS.clone(), "store", timeout_s=t),
        "Client.memmap": lambda: client.memmap(ROWS, name_afresh(), timeout_s=t),
        "Client.memmap_": lambda: client.memmap_(ROWS.clone(), name_afresh(), timeout_s=t),
        "Client.memmap_like": lambda: client.memmap_like(ROWS, name_afresh(), timeout_s=t),
        "Client.publish": lambda: client.publish("weights", ROW, timeout_s=t),
        "Client.publish [early]": lambda: client.publish("weights", ROW, timeout_s=t, return_early=True).result(),
        "Client.queue": lambda: client.queue("queue", timeout_s=t),
        "Client.recv": lambda: client.recv(ROWS.clone(), "store", timeout_s=t),
        "Client.replay": lambda: client.replay("replay", timeout_s=t),
        "Client.restore": lambda: client.restore(str(folder / "checkpoint"), prefix=name_afresh(), timeout_s=t),
        "Client.save": lambda: client.save(SMALL, name_afresh(), timeout_s=t),
        "Client.send": lambda: client.send(ROWS, "store", timeout_s=t),
        "Client.send [early]": lambda: client.send(ROWS, "store", timeout_s=t, return_early=True).result(),
        "Client.subscribe": lambda: next(iter(client.subscribe("weights", timeout_s=t))),
        "Client.version": lambda: client.version("published-once", 1, timeout_s=t),
        "Client.versions": lambda: client.versions("weights", timeout_s=t),
        "Client.wait_newer": lambda: client.wait_newer("weights", newer_than=1_000_000, timeout_s=t),
    }


def _make_store_calls(handles: Handles, t: float) -> Calls:
    store, texts = handles.store, handles.texts
    return {
        "StoreHandle.add_zeros": lambda: texts.add_zeros(texts.spec, timeout_s=t),
        "StoreHandle.batches": lambda: next(iter(store.batches(10, timeout_s=t))),
        "StoreHandle.clear": lambda: handles.doomed_store.clear(timeout_s=t),
        "StoreHandle.copy_": lambda: store.copy_(ROWS, timeout_s=t),
        "StoreHandle.copy_at_": lambda: store.copy_at_(ROW, 0, timeout_s=t),
        "StoreHandle.cpu": lambda: store.cpu(timeout_s=t),
        "StoreHandle.create_nested": lambda: texts.create_nested(name_afresh(), timeout_s=t),
        "StoreHandle.del_": lambda: texts.del_("z", timeout_s=t),
        "StoreHandle.fill_": lambda: store.fill_("x", 1.0, timeout_s=t),
        "StoreHandle.get": lambda: store.get("y", timeout_s=t),
        "StoreHandle.get_at": lambda: store.get_at("y", slice(0, 3), timeout_s=t),
        "StoreHandle.get_non_tensor": lambda: texts.get_non_tensor("t", timeout_s=t),
        "StoreHandle.load": lambda: store.load("store", timeout_s=t),
        "StoreHandle.load_": lambda: store.load_("store", timeout_s=t),
        "StoreHandle.load_memmap": lambda: store.load_memmap("store", timeout_s=t),
        "StoreHandle.load_memmap_": lambda: store.load_memmap_("store", timeout_s=t),
        "StoreHandle.lock_": lambda: handles.doomed_store.lock_(timeout_s=t),
        "StoreHandle.make_memmap": lambda: texts.make_memmap(name_afresh(), torch.Size([8]), timeout_s=t),
        "StoreHandle.make_memmap_from_tensor": lambda: texts.make_memmap_from_tensor(
            name_afresh(), torch.zeros(8), timeout_s=t
        ),
        "StoreHandle.map": lambda: store.map(timeout_s=t),
        "StoreHandle.masked_fill_": lambda: store.masked_fill_(torch.ones(300, dtype=torch.bool), 0, timeout_s=t),
        "StoreHandle.memmap_refresh_": lambda: store.memmap_refresh_(timeout_s=t),
        "StoreHandle.numpy": lambda: store.numpy(timeout_s=t),
        "StoreHandle.pop": lambda: texts.pop("z", None, timeout_s=t),
        "StoreHandle.popitem": lambda: handles.doomed_store.popitem(timeout_s=t),
        "StoreHandle.refresh": lambda: store.refresh(timeout_s=t),
        "StoreHandle.rename_key_": lambda: texts.rename_key_("x", "x", timeout_s=t),
        "StoreHandle.set": lambda: texts.set(name_afresh(), torch.zeros(8), timeout_s=t),
        "StoreHandle.set_": lambda: store.set_("y", torch.zeros(300, 2000), timeout_s=t),
        "StoreHandle.set_at_": lambda: store.set_at_("x", torch.zeros(3), 0, timeout_s=t),
        "StoreHandle.set_at_ [early]": lambda: store.set_at_(
            "x", torch.zeros(3), 0, timeout_s=t, return_early=True
        ).result(),
        "StoreHandle.set_at_ [values]": lambda: texts.set_at_("t", "other", 2, timeout_s=t),
        "StoreHandle.set_non_tensor": lambda: texts.set_non_tensor(name_afresh(), "text", timeout_s=t),
        "StoreHandle.setdefault": lambda: texts.setdefault(name_afresh(), torch.zeros(8), timeout_s=t),
        "StoreHandle.snapshot_at": lambda: store.snapshot_at(("x",), 0, timeout_s=t),
        "StoreHandle.to": lambda: store.to(torch.float64, timeout_s=t),
        "StoreHandle.to_tensordict": lambda: store.to_tensordict(timeout_s=t),
        "StoreHandle.unlock_": lambda: handles.doomed_store.unlock_(timeout_s=t),
        "StoreHandle.update": lambda: texts.update({name_afresh(): torch.zeros(8)}, timeout_s=t),
        "StoreHandle.update_": lambda: store.update_({"x": torch.ones(300, 3)}, timeout_s=t),
        "StoreHandle.update_at_": lambda: store.update_at_({"x": torch.ones(3)}, 0, timeout_s=t),
        "StoreHandle.zero_": lambda: store.zero_(timeout_s=t),
        "StoreView.get": lambda: store.select("x").get("x", timeout_s=t),
        "StoreView.to_tensordict": lambda: store.select("x").to_tensordict(timeout_s=t),
    }


def _make_table_calls(handles: Handles, t: float) -> Calls:
    replay, uniform = handles.replay, handles.uniform

    def write() -> None:
        writer = uniform.writer()
        writer.append(SMALL)
        writer.flush(timeout_s=t)

    return {
        "ReplayHandle.ack": lambda: uniform.ack([0], consumer="c", timeout_s=t),
        "ReplayHandle.add_leaves": lambda: handles.doomed_replay.add_leaves(make_leaf(), timeout_s=t),
        "ReplayHandle.batches": lambda: next(replay.batches(4, timeout_s=t)),
        "ReplayHandle.clear": lambda: handles.doomed_replay.clear(timeout_s=t),
        "ReplayHandle.close": lambda: handles.doomed_replay.close(timeout_s=t),
        "ReplayHandle.delete": lambda: uniform.delete([0], timeout_s=t),
        "ReplayHandle.extend": lambda: replay.extend(ROWS, timeout_s=t),
        "ReplayHandle.extend [early]": lambda: replay.extend(ROWS, timeout_s=t, return_early=True).result(),
        "ReplayHandle.extend [few]": lambda: uniform.extend(FEW, timeout_s=t),
        "ReplayHandle.extend [few, early]": lambda: uniform.extend(FEW, timeout_s=t, return_early=True).result(),
        "ReplayHandle.forget_draws": lambda: replay.forget_draws(timeout_s=t),
        "ReplayHandle.get_at": lambda: uniform.get_at("x", [0], timeout_s=t),
        "ReplayHandle.get_priorities": lambda: replay.get_priorities([0, 1], timeout_s=t),
        "ReplayHandle.read_rows": lambda: uniform.read_rows([0, 1], timeout_s=t),
        "ReplayHandle.renew": lambda: uniform.renew([0], 1.0, consumer="c", timeout_s=t),
        "ReplayHandle.sample": lambda: replay.sample(256, timeout_s=t),
        "ReplayHandle.sample [few]": lambda: uniform.sample(4, timeout_s=t),
        "ReplayHandle.set_at_": lambda: uniform.set_at_("x", torch.ones(3), 0, timeout_s=t),
        "ReplayHandle.set_limiter": lambda: uniform.set_limiter(tdserve.MinSize(1), timeout_s=t),
        "ReplayHandle.set_sampler": lambda: uniform.set_sampler(tdserve.Uniform(), timeout_s=t),
        "ReplayHandle.take": lambda: uniform.take(1, consumer="c", timeout_s=t),
        "ReplayHandle.update_if_present": lambda: uniform.update_if_present(
            [0], {"x": torch.ones(1, 3)}, generation=[1], timeout_s=t
        ),
        "ReplayHandle.update_priority": lambda: replay.update_priority(torch.arange(2), torch.ones(2), timeout_s=t),
        "ReplayHandle.update_priority [early]": lambda: replay.update_priority(
            torch.arange(2), torch.ones(2), timeout_s=t, return_early=True
        ).result(),
        "ReplayHandle.update_priority [many]": lambda: replay.update_priority(MANY, torch.ones(len(MANY)), timeout_s=t),
        "ReplayWriter.flush": write,
    }


def _make_queue_calls(handles: Handles, t: float) -> Calls:
    queue = handles.queue
    return {
        "QueueHandle.ack": lambda: queue.ack([0], timeout_s=t),
        "QueueHandle.add_leaves": lambda: handles.doomed_queue.add_leaves(
            TensorDict({name_afresh(): torch.zeros(1)}), timeout_s=t
        ),
        "QueueHandle.batches": lambda: next(queue.batches(1, timeout_s=t)),
        "QueueHandle.clear": lambda: handles.doomed_queue.clear(timeout_s=t),
        "QueueHandle.close": lambda: handles.doomed_queue.close(timeout_s=t),
        "QueueHandle.delete": lambda: queue.delete([0], timeout_s=t),
        "QueueHandle.extend": lambda: queue.extend(FEW, timeout_s=t),
        "QueueHandle.get_at": lambda: queue.get_at("x", [0], timeout_s=t),
        "QueueHandle.read_rows": lambda: queue.read_rows([0], timeout_s=t),
        "QueueHandle.renew": lambda: queue.renew([0], 1.0, timeout_s=t),
        "QueueHandle.set_at_": lambda: queue.set_at_("x", torch.ones(3), 0, timeout_s=t),
        "QueueHandle.set_limiter": lambda: queue.set_limiter(tdserve.MinSize(1), timeout_s=t),
        "QueueHandle.set_sampler": lambda: queue.set_sampler(tdserve.Fifo(), timeout_s=t),
        "QueueHandle.take": lambda: queue.take(1, timeout_s=t),
        "QueueHandle.take [leased]": lambda: queue.take(1, ack=False, timeout_s=t),
        "QueueHandle.update_if_present": lambda: queue.update_if_present(
            [0], {"x": torch.ones(1, 3)}, generation=[1], timeout_s=t
        ),
    }


def _make_keyed_calls(handles: Handles, t: float) -> Calls:
    entries = handles.entries
    wait_s = max(t, 0.1)  # 0 does not wait for keys, but does wait for a server that is away, as long as the client
    # does
    return {
        "KeyedHandle.delete": lambda: entries.delete("nothing", timeout_s=t),
        "KeyedHandle.get": lambda: entries.get("a", timeout_s=wait_s),
        "KeyedHandle.get [several]": lambda: entries.get(["a", "b"], timeout_s=wait_s),
        "KeyedHandle.get_with_versions": lambda: entries.get_with_versions("a", timeout_s=wait_s),
        "KeyedHandle.pop": lambda: entries.pop("nothing", timeout_s=wait_s),
        "KeyedHandle.pop [present]": lambda: entries.pop("c", timeout_s=wait_s),
        "KeyedHandle.put": lambda: entries.put("a", ROW, timeout_s=t),
        "KeyedHandle.put [early]": lambda: entries.put("a", ROW, timeout_s=t, return_early=True).result(),
        "KeyedHandle.put [large]": lambda: entries.put("large", ROWS, timeout_s=t),
        "KeyedHandle.put [value, early]": lambda: entries.put("b", "text", timeout_s=t, return_early=True).result(),
    }


def list_methods() -> Iterator[str]:
    """Lists the methods with ``timeout_s``, by class and name."""
    classes: tuple[type, ...] = (
        tdserve.Client,
        tdserve.StoreHandle,
        tdserve.ReplayHandle,
        tdserve.QueueHandle,
        tdserve.KeyedHandle,
        ReplayWriter,
    )
    return (name for name, signature in list_signatures(classes) if "timeout_s" in signature.parameters)


def list_signatures(classes: Iterable[type]) -> Iterator[tuple[str, inspect.Signature]]:
    """Lists the public methods, by class and name."""
    for each in classes:
        for name, method in inspect.getmembers(each, callable):
            if not name.startswith("_"):
                yield f"{each.__name__}.{name}", inspect.signature(method)
