"""A call of several steps has one deadline, even if the server stands still before one of the steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tests.integration.crashing import Crashing
from tests.integration.cutting import Cutting
from tests.integration.ending_in_time import stopped

pytestmark = pytest.mark.integration

TIMEOUT_S = 0.3
"""Of every call here. Its client's default is 30 s."""

IN_TIME: dict[str, Any] = {"timeout_s": TIMEOUT_S}

LIMIT_S = 6.0
"""Limit for these calls, all at once on a busy machine; alone they take less than 1 s."""

GONE = "gone"
"""A key that handles know but the store no longer has, or that neither has: an access asks for the structure."""

ROW = TensorDict({"x": torch.zeros(3), "y": torch.zeros(2)}, [])
ROWS = ROW.expand(4).clone()
ONE = torch.ones(4)
FIRST = {"index": torch.zeros(1, dtype=torch.int64), "generation": torch.zeros(1, dtype=torch.int64)}

Calls = dict[str, Callable[[], object]]


@pytest.fixture(scope="module")
def crashing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crashing]:
    """One server for all tests of this file; each test uses stores of its own."""
    with Crashing(tmp_path_factory.mktemp("handles")) as made:
        yield made


def list_key_calls(store: Any, other: Any) -> Calls:
    """Returns the calls of a handle that change its keys."""
    return {
        "set": lambda: store.set(GONE, ONE, **IN_TIME),
        "set_non_tensor": lambda: store.set_non_tensor(GONE, "text", **IN_TIME),
        "setdefault of a new key": lambda: store.setdefault(GONE, ONE, **IN_TIME),
        "setdefault": lambda: store.setdefault("x", ONE, **IN_TIME),
        "create_nested": lambda: store.create_nested(GONE, **IN_TIME),
        "update": lambda: store.update({GONE: ONE}, **IN_TIME),
        "update by another": lambda: store.update(other, **IN_TIME),
        "pop": lambda: store.pop("x", **IN_TIME),
        "popitem": lambda: store.popitem(**IN_TIME),
        "del_": lambda: store.del_("x", **IN_TIME),
        "clear": lambda: store.clear(**IN_TIME),
        "rename_key_": lambda: store.rename_key_("x", GONE, **IN_TIME),
        "load_memmap_": lambda: store.load_memmap_(other.name, **IN_TIME),
        "memmap_refresh_": lambda: store.memmap_refresh_(**IN_TIME),
        "make_memmap": lambda: store.make_memmap(GONE, [4], **IN_TIME),
        "make_memmap_from_tensor": lambda: store.make_memmap_from_tensor(GONE, ONE, **IN_TIME),
        "lock_": lambda: store.lock_(**IN_TIME),
        "refresh": lambda: store.refresh(**IN_TIME),
    }


def list_content_calls(store: Any, other: Any, view: Any) -> Calls:
    """Returns the calls of a handle and a view that read and write content."""
    return {
        "get": lambda: store.get(GONE, **IN_TIME),
        "get_at": lambda: store.get_at(GONE, 0, **IN_TIME),
        "get_non_tensor": lambda: store.get_non_tensor("x", **IN_TIME),
        "to_tensordict": lambda: store.to_tensordict(**IN_TIME),
        "to": lambda: store.to(torch.float64, **IN_TIME),
        "cpu": lambda: store.cpu(**IN_TIME),
        "numpy": lambda: store.numpy(**IN_TIME),
        "map": lambda: store.map(**IN_TIME),
        "batches": lambda: next(store.batches(2, **IN_TIME)),
        "set_": lambda: store.set_(GONE, ONE, **IN_TIME),
        "set_at_": lambda: store.set_at_(GONE, 1.0, 0, **IN_TIME),
        "set_at_ of another": lambda: store.set_at_("x", other.select("x"), ..., **IN_TIME),
        "update_": lambda: store.update_({GONE: ONE}, **IN_TIME),
        "update_ by another": lambda: store.update_(other, **IN_TIME),
        "update_at_": lambda: store.update_at_({GONE: 1.0}, 0, **IN_TIME),
        "copy_at_": lambda: store.copy_at_(other, ..., **IN_TIME),
        "add_": lambda: store.add_(1.0, **IN_TIME),
        "add_ of another": lambda: store.add_(other, **IN_TIME),
        "fill_": lambda: store.fill_(GONE, 1, **IN_TIME),
        "masked_fill_": lambda: store.masked_fill_(ONE > 0, 1, **IN_TIME),
        "get of a view": lambda: view.get("x", **IN_TIME),
        "fill_ of a view": lambda: view.fill_(GONE, 1, **IN_TIME),
        "set of another": lambda: store.set("x", other.select("x"), **IN_TIME),
        "set_ of another": lambda: store.set_("x", other.select("x"), **IN_TIME),
        "set_ of a view": lambda: view.set_("x", torch.ones(4, 3), **IN_TIME),
        "update_ of a view": lambda: view.update_(other, **IN_TIME),
    }


def list_client_calls(client: tdserve.Client, other: Any, shown: Any) -> Calls:
    """Returns the calls of a client about stores by name."""
    return {
        "memmap of a handle": lambda: client.memmap(other, f"{other.name}.copy", **IN_TIME),
        "memmap_": lambda: client.memmap_(ROWS.clone(), f"{other.name}.shown", **IN_TIME),
        "load_memmap": lambda: client.load_memmap(other.name, subpath="x", **IN_TIME),
        "load_memmap into one that shows a store": lambda: client.load_memmap_(shown, other.name, **IN_TIME),
        "memmap_refresh_ of one that shows a store": lambda: client.memmap_refresh_(shown, **IN_TIME),
        "memmap_refresh_ of a handle": lambda: client.memmap_refresh_(other, **IN_TIME),
        "describe": lambda: client.describe(other.name, **IN_TIME),
    }


def list_table_calls(replay: Any, queue: Any, leased: Any, kv: Any) -> Calls:
    """Returns the calls of a table, a queue and a keyed store that have more than one step."""
    wider = ROWS.clone().set(GONE, ONE)
    return {
        "get_at of a table": lambda: replay.get_at(GONE, [0], **IN_TIME),
        "set_at_ of a table": lambda: replay.set_at_(GONE, torch.ones(1), [0], **IN_TIME),
        "update_if_present": lambda: replay.update_if_present(FIRST, {GONE: torch.ones(1)}, **IN_TIME),
        "sample": lambda: replay.sample(2, require=GONE, **IN_TIME),
        "take": lambda: replay.take(2, consumer="c", require=GONE, **IN_TIME),
        "batches": lambda: replay.batches(2, require=GONE, **IN_TIME),
        "extend": lambda: replay.extend(wider, **IN_TIME),
        "extend of too many": lambda: queue.extend(ROWS.expand(9, 4).reshape(36), **IN_TIME),
        "add_leaves": lambda: replay.add_leaves(wider[0], **IN_TIME),
        "the next batch of a queue, after the last one was acknowledged": lambda: next(leased),
        "pop of a keyed store": lambda: kv.pop("a", **IN_TIME),
        "pop of an absent key": lambda: kv.pop("b", **IN_TIME),
    }


def measure(call: Callable[[], object]) -> float:
    """Returns how many seconds a call takes until it fails, or has read what this process can read by itself."""
    began_s = time.monotonic()
    with suppress(tdserve.TDServeError):
        call()
    return time.monotonic() - began_s


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["gloo", "shm"])
def test_calls_of_several_steps_when_the_server_stands_still_then_they_end_in_time(
    crashing: Crashing, transport: Any
) -> None:
    # The calls that had no answer in time may be carried out when the server goes on.
    with crashing.server.client(transport=transport) as client:
        store, other = client.memmap(ROWS, f"{transport}.store"), client.memmap(ROWS, f"{transport}.other")
        shown = client.memmap_(ROWS.clone(), f"{transport}.shown")
        replay, queue, kv = (
            client.create_replay(f"{transport}.replay", ROW, 10),
            client.create_queue(f"{transport}.queue", ROW, 10),
            client.create_kv(f"{transport}.kv"),
        )
        replay.extend(ROWS)
        queue.extend(ROWS)
        kv.put("a", 1)
        assert (store.get("x").shape, kv["a"], replay[0]["x"].shape) == ((4, 3), 1, (3,))
        leased = queue.batches(1, **IN_TIME)
        next(leased)
        calls = {
            **list_key_calls(store, other),
            **list_content_calls(store, other, other.select("x")),
            **list_client_calls(client, other, shown),
            **list_table_calls(replay, queue, leased, kv),
        }
        with stopped(crashing.server), ThreadPoolExecutor(len(calls)) as threads:
            took_s = dict(zip(calls, threads.map(measure, calls.values()), strict=True))
        assert {name: round(each_s, 2) for name, each_s in took_s.items() if each_s > LIMIT_S} == {}


class Muted:
    """A client whose server seems to stand still as soon as another client sees a certain state of a store.

    Attributes:
        store: The client's handle.
        witness: The other client's handle, which reaches the server all the time.
        cutting: What lies between.
    """

    def __init__(self, store: Any, witness: Any, cutting: Cutting) -> None:
        self.store, self.witness, self.cutting = store, witness, cutting

    def perform(self, call: Callable[[Any], object], is_due: Callable[[Any], bool]) -> None:
        """Makes a call, and mutes the client as soon as the witness sees the state; checks how long the call takes."""
        self.cutting.mute_when(lambda: is_due(self.witness))
        began_s = time.monotonic()
        try:
            call(self.store)
        finally:
            assert time.monotonic() - began_s < LIMIT_S
            assert self.cutting.was_muted.is_set()
            self.cutting.mend()


@pytest.fixture
def muted(crashing: Crashing) -> Iterator[Muted]:
    """A new store; every byte of its client's channel is seen on the way."""
    with (
        Cutting(crashing.server.address) as cutting,
        crashing.server.client(transport="grpc") as other,
        tdserve.connect(cutting.address, transport="grpc") as client,
    ):
        witness = other.memmap(ROWS, "muted")
        store = client["muted"]
        assert store.get("x").shape == (4, 3)
        yield Muted(store, witness, cutting)
        other.delete("muted")


CHANGES: dict[str, tuple[Callable[[Any], object], list[str]]] = {
    "set": (lambda store: store.set("new", ONE, **IN_TIME), ["x", "y", "new"]),
    "rename_key_": (lambda store: store.rename_key_("x", "new", **IN_TIME), ["y", "new"]),
    "create_nested": (lambda store: store.create_nested("new", **IN_TIME), ["x", "y", "new"]),
    "update": (lambda store: store.update({"new": ONE}, **IN_TIME), ["x", "y", "new"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_change_of_keys_when_the_server_stands_still_after_its_answer_then_it_succeeds_in_time_and_the_next_call_asks(
    muted: Muted, change: str
) -> None:
    call, keys = CHANGES[change]
    muted.perform(call, lambda witness: "new" in witness)
    assert set(muted.store.exclude("nothing").keys()) == set(keys)  # a view asks for nothing if the structure is known
    assert set(muted.store.spec.keys()) == set(keys)


@pytest.mark.slow
def test_pop_when_the_server_stands_still_after_the_removal_then_the_value_is_returned(muted: Muted) -> None:
    popped: list[Any] = []
    muted.perform(lambda store: popped.append(store.pop("x", **IN_TIME)), lambda it: "x" not in it)
    assert torch.equal(popped[0], ROWS["x"])
    with pytest.raises(tdserve.KeyNotFoundError):
        muted.store["x"]


@pytest.mark.slow
def test_setdefault_when_the_server_stands_still_after_the_value_was_set_then_it_ends_in_time(muted: Muted) -> None:
    with pytest.raises((tdserve.DeadlineExceededError, tdserve.ConnectError)):
        muted.perform(lambda store: store.setdefault("new", ONE, **IN_TIME), lambda witness: "new" in witness)
    assert muted.store.setdefault("new", 2 * ONE).tolist() == ONE.tolist()


@pytest.mark.slow
def test_lock_when_the_server_stands_still_after_it_was_set_then_it_succeeds_and_is_undone_at_the_end(
    muted: Muted,
) -> None:
    locked: list[Any] = []
    muted.perform(lambda store: locked.append(store.lock_(**IN_TIME)), lambda witness: witness.is_locked)
    with locked[0]:
        assert muted.witness.is_locked
    assert not muted.witness.is_locked


@pytest.mark.slow
def test_sample_of_a_consumer_when_its_acknowledgement_is_lost_then_it_ends_in_time_and_others_get_the_rows(
    crashing: Crashing,
) -> None:
    with (
        Cutting(crashing.server.address) as cutting,
        crashing.server.client(transport="grpc") as other,
        tdserve.connect(cutting.address, transport="grpc") as client,
    ):
        witness = other.create_replay("unacknowledged", ROW, 10, sampler=tdserve.Fifo())
        witness.extend(ROWS)
        muted = Muted(client.replay("unacknowledged"), witness, cutting)
        assert muted.store[0]["x"].shape == (3,)
        with pytest.raises((tdserve.DeadlineExceededError, tdserve.ConnectError)):
            muted.perform(
                lambda table: table.sample(4, consumer="c", **IN_TIME), lambda table: table.info()["num_leased"] == 4
            )
        assert witness.take(4, consumer="c", ack=False)["index"].tolist() == [0, 1, 2, 3]
