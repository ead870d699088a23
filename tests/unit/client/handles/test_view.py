"""A call on a view gives what it gives on a local tensordict, and fetches nothing else."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import tensordict
import torch
from tensordict import NonTensorStack, TensorDict

import tdserve
from tdserve.base.deadline import Deadline
from tdserve.client.handles.key_paths import to_path
from tdserve.client.handles.store_client import StoreClient
from tdserve.client.handles.view import StoreView
from tests.sameness import difference
from tests.tensordict_examples import Call, fault, outcome
from tests.tensordict_strategies import Inner
from tests.unit.client.handles.view_examples import CALLS, INDICES, local_rows


class Watched:
    """A store that remembers its reads: keys, and how many elements of its batch."""

    def __init__(self, store: StoreClient) -> None:
        self._store = store
        self.name, self.spec = store.name, store.spec
        self.reads: list[tuple[set[str], int]] = []

    def read(self, index: Any, keys: Sequence[tuple[str, ...]], **kwargs: Any) -> Any:
        """Reads entries as the store does."""
        found = self._store.read(index, keys, **kwargs)
        self.reads.append(({".".join(key) for key in keys}, found.numel() if found.batch_size else 1))
        return found

    def make_deadline(self, timeout_s: float | None) -> Deadline:
        """Returns the deadline of a call that begins now."""
        return self._store.make_deadline(timeout_s)

    def hand_over(self, found: Any) -> Any:
        """Returns what was read as it is."""
        return found


def at(index: Any) -> Call:
    """What reads by an index or key."""
    return lambda each: each[index]


@pytest.fixture(scope="module")
def shared(server: tdserve.Server) -> Iterator[Any]:
    """A store that is only read."""
    with server.client(transport="shm", timeout_s=20.0) as client:
        yield client.memmap(local_rows(), "views")


@pytest.fixture
def watched(server: tdserve.Server, shared: Any) -> Iterator[Any]:
    """The same store."""
    with server.client(transport="shm", timeout_s=20.0) as client:
        yield Watched(StoreClient(client, client.describe(shared.name)))


@pytest.fixture
def store(client: tdserve.Client, name: str) -> Any:
    """A store of one test, over either transport."""
    return client.memmap(local_rows(), name)


@pytest.mark.parametrize("call", list(CALLS.values()), ids=list(CALLS))
def test_view_when_read_in_any_way_then_as_of_the_local_one(shared: Any, call: Call) -> None:
    local, remote = outcome(call, local_rows()), outcome(call, shared)
    assert fault(local, remote) is None
    if isinstance(local, Exception):
        return
    assert isinstance(remote, StoreView)
    assert (remote.batch_size, remote.names) == (local.batch_size, local.names)
    assert set(remote.keys(True)) == set(local.keys(True))
    assert set(remote.keys(True, True)) == set(local.keys(True, True))
    faults = {
        which: fault(outcome(at(index), local), outcome(at(index), remote))
        for which, index in INDICES.items()
        if local.batch_size or to_path(index)  # without dimensions errors are of another kind
    }
    assert {which: found for which, found in faults.items() if found is not None} == {}


WANTED: list[tuple[str, Call, Callable[[Any], Any], set[str], int]] = [
    ("key", lambda each: each.select("a", "n"), lambda view: view["a"], {"a"}, 12),
    ("key, of all", lambda each: each.view(-1), lambda view: view["n", "b"], {"n.b"}, 12),
    ("node", lambda each: each.permute(1, 0), lambda view: view["n"], {"n"}, 12),
    ("flattened key", lambda each: each.flatten_keys(), lambda view: view["n.b"], {"n.b"}, 12),
    ("select", lambda each: each.select("a"), lambda view: view[3:5], {"a"}, 3),
    ("exclude", lambda each: each.exclude("n", "t"), lambda view: view[0, 1], {"a"}, 1),
    ("split", lambda each: each.select("a").split(3)[1], lambda view: view.to_tensordict(), {"a"}, 3),
    ("chunk", lambda each: each.chunk(2)[1].chunk(2)[0], lambda view: view["a"], {"a"}, 3),
    ("unbind", lambda each: each.select("a").unbind(1)[0], lambda view: view[:2], {"a"}, 2),
    ("permuted", lambda each: each.select("a").permute(1, 0), lambda view: view[0], {"a"}, 4),
    ("reshaped", lambda each: each.reshape(-1), lambda view: view.get_at("a", slice(3, 5)), {"a"}, 2),
    ("reshaped, split", lambda each: each.reshape(-1).split(2)[3], lambda view: view["a"], {"a"}, 2),
    ("computed", lambda each: each.select("a").split(1)[0], lambda view: view.sum(), {"a"}, 3),
    ("gathered", lambda each: each.select("a"), lambda view: view.gather(0, torch.tensor([[0, 1, 2]])), {"a"}, 3),
    ("masked", lambda each: each.select("a"), lambda view: view.masked_select(torch.eye(4, 3).bool()), {"a"}, 3),
]


@pytest.mark.parametrize(("call", "read", "keys", "size"), [case[1:] for case in WANTED], ids=[x[0] for x in WANTED])
def test_view_when_a_part_is_read_then_nothing_else_is_fetched_and_once(
    watched: Any, call: Call, read: Callable[[Any], Any], keys: set[str], size: int
) -> None:
    view = call(StoreView(watched))
    assert watched.reads == []
    assert fault(read(call(local_rows())), read(view)) is None
    assert watched.reads == [(keys, size)]


def test_view_when_looked_at_then_shows_its_tree_and_fetches_nothing(watched: Any) -> None:
    view = StoreView(watched).flatten_keys().view(2, 6).select("n.b", "t")
    assert "n.b: Tensor(shape=torch.Size([2, 6]), device=cpu, dtype=torch.int64" in repr(view)
    assert "a:" not in repr(view)
    assert (len(view), view.ndim, view.numel(), view.is_empty()) == (2, 2, 12, False)
    assert ("t" in view, "a" in view) == (True, False)
    assert watched.reads == []


def test_view_when_of_no_leaves_then_has_its_batch_size_without_a_read(watched: Any) -> None:
    view = StoreView(watched).select().split(2)[0]
    assert view.to_tensordict().batch_size == (2, 3)
    assert view[0].batch_size == (3,)
    assert watched.reads == []


WRITES: dict[str, Call] = {
    "row of a selection": lambda each: each.select("a", "t").update_at_({"a": torch.zeros(3, 2)}, 1),
    "split": lambda each: each.split(2)[1].select("a").zero_(),
    "unbind": lambda each: each.unbind(1)[2].set_at_("a", torch.ones(2), [0, 3]),
    "permute": lambda each: each.permute(1, 0).set_at_("a", torch.arange(8.0).view(4, 2), 1),
    "view": lambda each: each.view(-1).set_at_("a", torch.arange(6.0).view(3, 2), torch.tensor([1, 5, 7])),
    "unsqueeze": lambda each: each.unsqueeze(0).update_({"n": {"b": torch.zeros(1, 4, 3, dtype=torch.int64)}}),
    "number": lambda each: each.select("a", ("n", "b")).__setitem__((slice(None), 1), 0),
    "flattened keys": lambda each: each.flatten_keys().set_("n.b", torch.ones(4, 3, dtype=torch.int64)),
    "in place": lambda each: each.select("a").add_(1),
    "fill_": lambda each: each.chunk(2)[0].fill_("a", 7.0),
    "masked_fill_": lambda each: each.select("a").masked_fill_(torch.eye(4, 3).bool(), 9.0),
    "step": lambda each: each.split(2)[1].update_at_({"a": torch.full((1, 3, 2), 5.0)}, slice(None, None, 2)),
}


@pytest.mark.slow
@pytest.mark.parametrize("call", list(WRITES.values()), ids=list(WRITES))
def test_view_when_written_then_the_store_has_it_as_a_local_one_would(store: Any, call: Call) -> None:
    td = local_rows()
    call(td)
    call(store)
    assert difference(td, store.to_tensordict()) is None


def test_view_when_written_with_a_tensordict_then_its_rows_have_it(store: Any) -> None:
    td = local_rows()
    new = local_rows().select("a", "n")[0] * 10
    store.select("a", "n")[1:3] = new
    td[1:3] = new
    store.split(2)[1].select("a")["a"] = torch.zeros(2, 3, 2)
    td["a"][2:] = 0
    assert difference(td, store.to_tensordict()) is None
    store.reshape(-1).update_(td.reshape(-1) * 2)
    assert difference(td * 2, store.to_tensordict()) is None


REFUSED: list[tuple[Call, type[Exception]]] = [
    (lambda each: each.expand(2, 4, 3).zero_(), tdserve.NotSupportedError),
    (lambda each: each.select("a").update_({"t": "new"}), tdserve.SpecMismatchError),
    (lambda each: each.select("a").update_(local_rows()), tdserve.SpecMismatchError),
    (lambda each: each.select("a").set("zz", torch.zeros(4, 3)), tdserve.KeyNotFoundError),
    (lambda each: each.select("a").__setitem__(0, local_rows()[:, 0].select("a")), tdserve.SpecMismatchError),
    (lambda each: each.select("a").__setitem__(9, 0), IndexError),
    (lambda each: each.select("a")["t"], KeyError),
    (lambda each: each.select("a").pop("a"), tdserve.NotSupportedError),
    (lambda each: each.select("a").lock_(), tdserve.NotSupportedError),
    (lambda each: each.view(-1).zz, AttributeError),
]


@pytest.mark.slow
@pytest.mark.parametrize(("call", "error"), REFUSED, ids=range(len(REFUSED)))
def test_view_when_it_cannot_be_done_then_refused_and_nothing_changes(
    store: Any, call: Call, error: type[Exception]
) -> None:
    with pytest.raises(error):
        call(store)
    assert difference(local_rows(), store.to_tensordict()) is None


def test_view_when_the_store_changes_then_it_shows_the_new_rows(store: Any) -> None:
    view = store.select("a").view(-1)
    store.set_at_("a", torch.full((3, 2), -1.0), 2)
    assert view[6]["a"].tolist() == [-1.0, -1.0]


def test_view_when_the_store_has_tensorclasses_then_they_come_back(client: tdserve.Client, name: str) -> None:
    record = Inner(z=torch.arange(4.0), tag="t", batch_size=[4])
    td = TensorDict({"rec": record, "x": torch.arange(4)}, [4])
    store: Any = client.memmap(td, name)
    calls: list[Call] = [
        lambda each: each.select("rec").view(2, 2),
        lambda each: each.select(("rec", "z"))[1:3],
        lambda each: each.view(2, 2)[0],
        lambda each: each.flatten_keys(".").split(2)[1],
        lambda each: each.unsqueeze(0)["rec"],
    ]
    for call in calls:
        assert fault(call(td), call(store)) is None
    root: Any = client.memmap(record, name + "-root")
    for call in [lambda each: each.view(2, 2), lambda each: each.split(2)[1], lambda each: each.unbind(0)[1]]:
        assert fault(call(record), call(root)) is None


def test_view_when_the_store_is_locked_then_so_is_what_is_read_whole(client: tdserve.Client, name: str) -> None:
    td = local_rows().lock_()
    store: Any = client.memmap(td, name)
    calls: list[Call] = [
        lambda each: each.view(-1),
        lambda each: each.select("a", "n"),
        lambda each: each.split(2)[1],
        lambda each: each.flatten_keys().permute(1, 0),
        lambda each: each.split(2)[1]["n"],
        lambda each: each.exclude(("n", "b"), ("n", "t")),
    ]
    for call in calls:
        assert call(store).is_locked
        assert fault(call(td), call(store)) is None
    store.split(2)[1].zero_()
    assert not bool(store["a"][2:].any())


def test_view_when_rows_differ_then_they_are_arranged_as_local_ones(client: tdserve.Client, name: str) -> None:
    rows = [TensorDict({"x": torch.arange(float(size)), "y": torch.tensor(size)}) for size in (1, 2, 3, 4)]
    td = tensordict.lazy_stack(rows)
    store: Any = client.memmap(td, name)
    assert fault(td.select("y"), store.select("y").to_tensordict().contiguous()) is None
    assert [row["x"].tolist() for row in store.split(2)[1].to_tensordict().unbind(0)] == [[0, 1, 2], [0, 1, 2, 3]]
    assert store.unsqueeze(0)[0, 2]["x"].tolist() == [0, 1, 2]
    assert "x: Tensor(shape=torch.Size([4, -1])" in repr(store.select("x"))
    other = tensordict.lazy_stack([TensorDict({"x": torch.ones(2)}), TensorDict({"y": torch.ones(3)})])
    packed: Any = client.memmap(other, name + "-packed")
    assert packed.split(1)[1].to_tensordict()[0]["y"].tolist() == [1, 1, 1]
    with pytest.raises(tdserve.NotSupportedError, match="write it in the store"):
        packed.split(1)[0].set_("x", torch.zeros(1, 2))


def test_view_when_rows_have_values_then_each_its_own(client: tdserve.Client, name: str) -> None:
    td = TensorDict({"text": NonTensorStack(*"abcd"), "x": torch.arange(4)}, [4])
    store: Any = client.memmap(td, name)
    calls: list[Call] = [
        lambda each: each.split(2)[1],
        lambda each: each.unbind(0)[3],
        lambda each: each.select("text")[[2, 0]],
        lambda each: each.exclude("x")["text"],
        lambda each: each.flatten_keys().split([1, 3])[1]["text"],
        lambda each: each.unsqueeze(0)[0],
        lambda each: each.reshape(2, 2)[1],
        lambda each: each.expand(2, 4)[0],
    ]
    for call in calls:
        assert fault(call(td), call(store)) is None
    store.split(2)[1]["text"] = ["C", "D"]
    store.reshape(2, 2).set_at_("text", "B", (0, 1))
    assert store["text"] == ["a", "B", "C", "D"]


def test_view_when_iterated_then_its_rows_in_few_reads(shared: Any, watched: Any) -> None:
    rows = list(StoreView(watched).select("a").split(3)[0])
    assert fault(local_rows().select("a")[:3].unbind(0), rows) is None
    assert watched.reads == [({"a"}, 9)]
    with pytest.raises(TypeError, match="no batch dimension"):
        iter(shared.unbind(0)[0].unbind(0)[0]).__next__()


def test_view_when_pickled_then_it_is_a_view_of_the_same_store(store: Any) -> None:
    view = pickle.loads(pickle.dumps(store.select("a").permute(1, 0)))
    assert torch.equal(view[1]["a"], local_rows()["a"][:, 1])


def test_view_when_large_then_parts_come_over_any_transport(client: tdserve.Client, name: str) -> None:
    td = TensorDict({"x": torch.arange(6000.0).view(3000, 2), "y": torch.arange(3000)}, [3000])
    store: Any = client.memmap(td, name)
    picked = torch.randperm(3000)[:700]
    np.testing.assert_array_equal(store.view(30, 100).view(-1)[picked]["x"], td["x"][picked])
    assert difference(td.view(30, 100)[:, 3:5], store.view(30, 100)[:, 3:5]) is None
    assert difference(td.view(30, 100).permute(1, 0), store.view(30, 100).permute(1, 0).to_tensordict()) is None
