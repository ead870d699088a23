"""Calls under the modes of torch that change what every operation of a thread does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tdserve

pytestmark = pytest.mark.integration


@pytest.fixture(params=["shm", "gloo"])
def fresh(request: pytest.FixtureRequest, server: tdserve.Server) -> Iterator[tdserve.Client]:
    """A client that has mapped nothing yet, over each transport."""
    with server.client(transport=request.param, timeout_s=20.0) as made:
        yield made


# ------------------------------------------------------------------------------------------ inference mode


def test_store_when_first_read_in_inference_mode_then_others_write_it_as_before(
    fresh: tdserve.Client, name: str
) -> None:
    fresh.init_remote({"a": torch.zeros(5, 3), "none": torch.zeros(5, 0)}, name, batch_size=[5])
    store = fresh[name]
    with torch.inference_mode():
        assert store["a"].sum() == 0
    store.set_at_("a", torch.ones(2, 3), torch.tensor([1, 3]))
    fresh.send(TensorDict({"a": store["a"].expand(5, 3), "none": torch.zeros(5, 0)}, [5]), name)
    with torch.inference_mode():
        store.set_at_("a", torch.full((3,), 2.0), 0)
    assert store["a"].sum(1).tolist() == [6, 3, 0, 3, 0]


def test_version_when_first_mapped_in_inference_mode_then_others_may_change_their_own(
    server: tdserve.Server, name: str
) -> None:
    with server.client(transport="shm", timeout_s=20.0) as client:
        client.publish(name, {"a": torch.zeros(3), "none": torch.zeros(0)})
        with torch.inference_mode():
            found: Any = client.latest(name, copy=False)
        assert not found.data["a"].is_inference()
        assert found.data["a"].add_(1).tolist() == [1, 1, 1]


@pytest.mark.parametrize("width", [2, 40_000], ids=["small", "large"])
@pytest.mark.parametrize("mode", [nullcontext, torch.inference_mode])
def test_latest_when_its_places_were_made_in_inference_mode_then_filled_in_any_and_converted(
    fresh: tdserve.Client, name: str, mode: Any, width: int
) -> None:
    source = torch.nn.Linear(2, width)
    fresh.publish(name, source)
    with torch.inference_mode():
        whole, half = torch.nn.Linear(2, width), torch.nn.Linear(2, width, dtype=torch.float16)
        strided = TensorDict({key: torch.zeros(*item.shape, 2)[..., 0] for key, item in source.named_parameters()})
    mixed = torch.nn.Linear(2, width, dtype=torch.float64)
    mixed.bias = half.bias
    with mode():
        for target in (whole, half, mixed):
            fresh.latest(name, into=target)
        fresh.latest(name, out=strided)
        for key, expected in source.named_parameters():
            for found in (*(target.get_parameter(key) for target in (whole, half, mixed)), strided[key]):
                assert torch.equal(found, expected.to(found.dtype))


# ------------------------------------------------------------------------------------------ every public call

NUM_ROWS = 4


def make(*shape: int) -> torch.Tensor:
    """Returns a tensor with content, whatever the default device."""
    return torch.ones(shape, device="cpu")


def positions(*numbers: int) -> torch.Tensor:
    """Returns row numbers, whatever the default device."""
    return torch.tensor(numbers, device="cpu")


class Stores:
    """A store, weights, tables and keyed stores, on which the calls below work."""

    def __init__(self, client: tdserve.Client, name: str) -> None:
        self.client = client
        self.name = name
        self.td = TensorDict({"a": make(NUM_ROWS, 3)}, [NUM_ROWS])
        self.names = {kind: f"{name}-{kind}" for kind in ("store", "weights", "kv", "like", "table", "queue", "new")}
        self.of = self.names.__getitem__
        client.init_remote(self.td, self.of("store"))
        self.store = client[self.of("store")]
        client.publish(self.of("weights"), {"a": make(300, 300)})
        self.kv = client.create_kv(self.of("kv"))
        self.kv.put("x", make(3))
        self.like = client.create_kv(self.of("like"), like=make(3))
        self.like.put("x", make(3))
        sampler = tdserve.Prioritized(alpha=1.0, beta=1.0)
        self.table = client.create_replay(self.of("table"), self.td[0], 64, sampler=sampler)
        self.table.extend(self.td)
        self.queue = client.create_queue(self.of("queue"), like=self.td[0], max_size=64)
        self.queue.extend(self.td)

    def append(self) -> None:
        """Appends a row."""
        with self.table.writer() as writer:
            writer.append(self.td[0])

    def next_batch(self) -> Any:
        """Returns a batch of an iterator."""
        batches = self.table.batches(2)
        found = next(batches)
        batches.close()
        return found


CALLS: dict[str, Callable[[Stores], Any]] = {
    "from_remote_init": lambda it: it.client.from_remote_init(it.of("store")),
    "leaf": lambda it: it.store["a"],
    "row": lambda it: it.store[1],
    "rows": lambda it: it.store[[1, 2]],
    "get_at": lambda it: it.store.get_at("a", slice(0, 2)),
    "select": lambda it: it.store.select("a")[1:3].to_tensordict(),
    "iter": lambda it: next(iter(it.store)),
    "set_at_": lambda it: it.store.set_at_("a", make(3), 1),
    "set_at_ of numbers": lambda it: it.store.set_at_("a", make(2, 3), positions(1, 2)),
    "set_at_ of a number": lambda it: it.store.set_at_("a", 1.0, 1),
    "set": lambda it: it.store.set("a", make(NUM_ROWS, 3)),
    "rows =": lambda it: it.store.__setitem__(slice(0, 2), it.td[:2]),
    "send": lambda it: it.client.send(it.td, it.of("store")),
    "recv": lambda it: it.client.recv(it.td.clone(), it.of("store")),
    "init_remote": lambda it: it.client.init_remote(it.td, it.of("new"), exists_ok=True),
    "publish": lambda it: it.client.publish(it.of("weights"), {"a": make(300, 300)}),
    "latest": lambda it: it.client.latest(it.of("weights")),
    "latest of a dtype": lambda it: it.client.latest(it.of("weights"), dtype=torch.bfloat16),
    "put": lambda it: it.kv.put("x", make(3)),
    "put of several": lambda it: it.kv.put(["x", "y"], [make(3), make(3)]),
    "put of a dict": lambda it: it.kv.put("d", {"a": make(2), "s": 1}),
    "get": lambda it: it.kv["x"],
    "put like": lambda it: it.like.put("z", make(3)),
    "get like": lambda it: it.like.get(["x", "x"]),
    "extend": lambda it: it.table.extend(it.td),
    "append": lambda it: it.append(),
    "sample": lambda it: it.table.sample(3),
    "batches": lambda it: it.next_batch(),
    "update_priority": lambda it: it.table.update_priority(positions(0, 1), make(2)),
    "get_priorities": lambda it: it.table.get_priorities(positions(0, 1)),
    "rows of a table": lambda it: it.table[:2],
    "delete": lambda it: it.table.delete(positions(0)),
    "queue": lambda it: (it.queue.extend(it.td), it.queue.take(1)),
}


@pytest.fixture(scope="module", params=["shm", "gloo", "grpc"])
def stores(request: pytest.FixtureRequest, server: tdserve.Server) -> Iterator[Stores]:
    """Stores for all calls, over each transport."""
    with server.client(transport=request.param, timeout_s=20.0) as made:
        found = Stores(made, f"modes-{request.param}")
        yield found
        for each in found.names.values():
            if each in made:
                made.delete(each)


def check_on_cpu(found: Any) -> None:
    """Checks that all tensors that a call has returned are plain ones on the CPU."""
    if isinstance(found, torch.Tensor):
        assert found.device.type == "cpu"
        assert found.isfinite().all()
    elif isinstance(found, TensorDict):
        for each in found.values(include_nested=True, leaves_only=True):
            check_on_cpu(each)
    elif isinstance(found, (tuple, list)):
        for each in found:
            check_on_cpu(each)


@pytest.mark.parametrize("call", CALLS)
def test_call_when_the_default_device_is_another_then_works_on_the_cpu(stores: Stores, call: str) -> None:
    with torch.device("meta"):
        found = CALLS[call](stores)
    check_on_cpu(found)
    check_on_cpu(stores.store["a"])


TRANSFORMS: dict[str, Callable[[Callable[[torch.Tensor], torch.Tensor]], Any]] = {
    "vmap": lambda function: torch.vmap(function)(torch.eye(2)),
    "grad": lambda function: torch.func.grad(lambda x: function(x).sum())(torch.ones(2)),
    "jacrev": lambda function: torch.func.jacrev(function)(torch.ones(2)),
    "jvp": lambda function: torch.func.jvp(function, (torch.ones(2),), (torch.ones(2),)),
    "hessian": lambda function: torch.func.hessian(lambda x: function(x).square().sum())(torch.ones(2)),
    "functionalize": lambda function: torch.func.functionalize(function)(torch.ones(2)),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_call_when_inside_of_a_transform_then_works_outside_of_it(stores: Stores, transform: str) -> None:
    made, given = make(2, 3), stores.td
    latest: Any = stores.client.latest
    held = stores.queue.take(1, ack=False, timeout_s=5.0)

    def work(x: torch.Tensor) -> torch.Tensor:
        stores.store.set_at_("a", made, slice(0, 2))
        stores.client.send(given, stores.of("store"))
        stores.client.publish(stores.of("weights"), {"a": made})
        stores.kv.put("x", made)
        stores.table.extend(given)
        read = [
            stores.store["a"],
            stores.store.get_at("a", 0),
            latest(stores.of("weights")).data["a"],
            stores.table.sample(2)["a"],
            stores.kv["x"],
        ]
        return x * sum(float(each.sum()) for each in read)

    TRANSFORMS[transform](work)
    stores.queue.ack(held)  # with the session of before
    stores.queue.extend(stores.td[:1])
    check_on_cpu(stores.store["a"])


GIVEN: dict[str, Callable[[Stores, torch.Tensor], Any]] = {
    "set_at_": lambda it, x: it.store.set_at_("a", x, 0),
    "send": lambda it, x: it.client.send(TensorDict({"a": x.expand(NUM_ROWS, 3)}, [NUM_ROWS]), it.of("store")),
    "publish": lambda it, x: it.client.publish(it.of("weights"), {"a": x}),
    "put": lambda it, x: it.kv.put("x", x),
    "extend": lambda it, x: it.table.extend({"a": x[None]}),
    "index": lambda it, x: it.store.get_at("a", x.long()),
    "rows": lambda it, x: it.table.get_at("a", x.long()),
    "priority": lambda it, x: it.table.update_priority(positions(0), x.sum()),
    "out": lambda it, x: it.client.latest(it.of("weights"), out=TensorDict({"a": x.expand(300, 300, 3)[..., 0]}, [])),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("call", GIVEN)
def test_call_when_given_a_tensor_of_a_transform_then_refused_and_the_session_goes_on(
    stores: Stores, transform: str, call: str
) -> None:
    stores.client.publish(stores.of("weights"), {"a": make(300, 300)})
    held = stores.queue.take(1, ack=False, timeout_s=5.0)

    def work(x: torch.Tensor) -> torch.Tensor:
        with pytest.raises((tdserve.NotSupportedError, tdserve.SelectionError, tdserve.SpecMismatchError)):
            GIVEN[call](stores, torch.cat([x, x[:1]]))
        return x * 2

    try:
        TRANSFORMS[transform](work)
    finally:
        stores.queue.ack(held)  # with the session of before
        stores.queue.extend(stores.td[:1])
