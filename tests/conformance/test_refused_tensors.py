"""Tensors without bytes of their own: every public write refuses them by key, over every transport, and nothing else
is lost: rows, leases and the session stay as they were."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, NamedTuple

import pytest
import torch
from tensordict import NonTensorData, TensorDict
from torch import distributed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.masked import masked_tensor

import tdserve

pytestmark = pytest.mark.integration


class Given(NamedTuple):
    """A tensor that is written.

    Attributes:
        whole: All rows.
        rows: The first two; of freed memory torch makes no views.
    """

    whole: Any
    rows: list[Any]

    @classmethod
    def of(cls, whole: Any) -> Given:
        """Returns a tensor with its rows."""
        return cls(whole, [whole[0], whole[1]])


Write = Callable[[Given], object]

NUM_ROWS = 4

_NUMBERS = count()


@pytest.fixture(scope="module", autouse=True)
def _process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A group of this process alone, which a DTensor needs."""
    place = tmp_path_factory.mktemp("group") / "store"
    distributed.init_process_group("gloo", init_method=f"file://{place}", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.fixture(scope="module", params=["shm", "gloo", "grpc"])
def client(request: pytest.FixtureRequest, server: tdserve.Server) -> Iterator[tdserve.Client]:
    """A client over each transport."""
    with server.client(transport=request.param) as connected:
        yield connected


def give_dtensor(write: Write) -> None:
    """Writes a DTensor."""
    write(Given.of(distribute_tensor(torch.ones(NUM_ROWS, 4), init_device_mesh("cpu", (1,)), [Shard(0)])))


def give_fake(write: Write) -> None:
    """Writes a fake tensor, whose mode has ended."""
    with FakeTensorMode():
        given = Given.of(torch.ones(NUM_ROWS, 4))
    write(given)


def give_masked(write: Write) -> None:
    """Writes a masked tensor."""
    write(Given.of(masked_tensor(torch.ones(NUM_ROWS, 4), torch.ones(NUM_ROWS, 4, dtype=torch.bool))))


def give_in_vmap(write: Write) -> None:
    """Writes inside of torch.vmap."""
    torch.vmap(lambda each: (write(Given.of(each)), each)[1])(torch.ones(2, NUM_ROWS, 4))


def give_freed(write: Write) -> None:
    """Writes a tensor whose memory was freed."""
    given = Given.of(torch.ones(NUM_ROWS, 4))
    given.whole.untyped_storage().resize_(0)
    write(given)


def give_freed_view(write: Write) -> None:
    """Writes a view of memory that was freed."""
    given = Given.of(torch.ones(2 * NUM_ROWS, 8)[1::2, 4:])
    given.whole.untyped_storage().resize_(0)
    write(given)


KINDS: dict[str, Callable[[Write], None]] = {
    "DTensor": give_dtensor,
    "fake": give_fake,
    "masked": give_masked,
    "in vmap": give_in_vmap,
    "freed": give_freed,
    "freed view": give_freed_view,
}


class Stores(NamedTuple):
    """What is written to; each of NUM_ROWS rows of ones at key "a".

    Attributes:
        client: The client.
        handle: A store that also has the key "b".
        table: A replay.
        queue: A queue.
        ragged: A table whose rows differ in size.
        any: A keyed store of entries of any kind.
        like: One of entries of one structure.
        tensor: One of tensors.
    """

    client: tdserve.Client
    handle: Any
    table: Any
    queue: Any
    ragged: Any
    any: Any
    like: Any
    tensor: Any

    def name(self) -> str:
        """Returns the name of no store."""
        return f"refused-{next(_NUMBERS)}"


@pytest.fixture(scope="module")
def stores(client: tdserve.Client) -> Stores:
    """What is written to."""
    ones = torch.ones(NUM_ROWS, 4)
    names = [f"refused-{next(_NUMBERS)}" for _ in range(7)]
    handle = client.memmap(TensorDict({"a": ones, "b": ones[:, 0]}, [NUM_ROWS]), names[0])
    table = client.create_replay(names[1], like={"a": ones[0]}, capacity=NUM_ROWS)
    queue = client.create_queue(names[2], like={"a": ones[0]}, max_size=2 * NUM_ROWS)
    ragged = client.create_replay(names[3], like={"a": ones[0]}, capacity=NUM_ROWS, ragged=["a"])
    table.extend(TensorDict({"a": ones}, [NUM_ROWS]))
    stores = client.create_kv(names[4]), client.create_kv(names[5], like={"a": ones}), client.create_kv(names[6], ones)
    for kv in stores:
        kv.put("a", {"a": ones} if kv is stores[1] else ones)
    return Stores(client, handle, table, queue, ragged, *stores)


def rows_of(tensor: Any, **more: Any) -> TensorDict:
    """Returns rows with a tensor at key "a"."""
    return TensorDict({"a": tensor, **more}, [NUM_ROWS])


def in_many(tensor: Any) -> TensorDict:
    """Returns so many leaves that they are captured together."""
    return TensorDict({**{f"k{number}": torch.ones(NUM_ROWS) for number in range(80)}, "a": tensor}, [NUM_ROWS])


def index_of(table: Any) -> Any:
    """Returns the numbers of all rows."""
    return torch.arange(NUM_ROWS)


ONES = torch.ones(NUM_ROWS)

WRITES: dict[str, Callable[[Stores, Any, list[Any]], object]] = {
    "init_remote": lambda to, x, rows: to.client.init_remote(rows_of(x), to.name()),
    "init_remote of a dict": lambda to, x, rows: to.client.init_remote({"a": x}, to.name()),
    "init_remote nested": lambda to, x, rows: to.client.init_remote(
        TensorDict({"n": rows_of(x)}, [NUM_ROWS]), to.name()
    ),
    "memmap": lambda to, x, rows: to.client.memmap(rows_of(x), to.name()),
    "send": lambda to, x, rows: to.client.send(rows_of(x, b=ONES), to.handle.name),
    "publish": lambda to, x, rows: to.client.publish(to.name(), rows_of(x)),
    "publish of many leaves": lambda to, x, rows: to.client.publish(to.name(), in_many(x)),
    "store[key] =": lambda to, x, rows: to.handle.__setitem__("a", x),
    "store[:] =": lambda to, x, rows: to.handle.__setitem__(slice(None), rows_of(x, b=ONES)),
    "store[:] = dict": lambda to, x, rows: to.handle.__setitem__(slice(None), {"a": x, "b": ONES}),
    "set_at_ of a view": lambda to, x, rows: to.handle.select("a").set_at_("a", x, slice(None)),
    "set": lambda to, x, rows: to.handle.set("a", x),
    "set of a new key": lambda to, x, rows: to.handle.set("a2", x),
    "set_": lambda to, x, rows: to.handle.set_("a", x),
    "set_at_": lambda to, x, rows: to.handle.set_at_("a", x, slice(None)),
    "set_at_ of listed rows": lambda to, x, rows: to.handle.set_at_("a", x, [3, 1, 0, 2]),
    "update": lambda to, x, rows: to.handle.update({"a": x}),
    "update of a new key": lambda to, x, rows: to.handle.update({"a2": x}),
    "update_": lambda to, x, rows: to.handle.update_({"a": x}),
    "update_ of a tensordict": lambda to, x, rows: to.handle.update_(rows_of(x)),
    "update_at_": lambda to, x, rows: to.handle.update_at_({"a": x}, slice(None)),
    "copy_": lambda to, x, rows: to.handle.copy_(rows_of(x, b=ONES)),
    "copy_at_": lambda to, x, rows: to.handle.copy_at_(rows_of(x, b=ONES), slice(None)),
    "setdefault": lambda to, x, rows: to.handle.setdefault("a2", x),
    "set of a view": lambda to, x, rows: to.handle.select("a").set("a", x),
    "set_ of a view": lambda to, x, rows: to.handle.select("a").set_("a", x),
    "update_ of a view": lambda to, x, rows: to.handle.select("a").update_({"a": x}),
    "extend": lambda to, x, rows: to.table.extend(rows_of(x)),
    "extend of a dict": lambda to, x, rows: to.table.extend({"a": x}),
    "extend of dicts": lambda to, x, rows: to.table.extend([{"a": rows[0]}, {"a": rows[1]}]),
    "extend of lists of tensors": lambda to, x, rows: to.table.extend({"a": rows}),
    "extend early": lambda to, x, rows: to.table.extend(rows_of(x), return_early=True),
    "extend of a queue": lambda to, x, rows: to.queue.extend(rows_of(x)),
    "extend of ragged rows": lambda to, x, rows: to.ragged.extend([{"a": rows[0]}, {"a": rows[1]}]),
    "append": lambda to, x, rows: to.table.writer().append({"a": rows[0]}),
    "append of a tensordict": lambda to, x, rows: to.table.writer().append(TensorDict({"a": rows[0]})),
    "set_at_ of a table": lambda to, x, rows: to.table.set_at_("a", x, index_of(to.table)),
    "update_if_present": lambda to, x, rows: to.table.update_if_present(
        index_of(to.table), {"a": x}, generation=to.table.find_generations(index_of(to.table))
    ),
    "update_if_present of a tensordict": lambda to, x, rows: to.table.update_if_present(
        index_of(to.table), rows_of(x), generation=to.table.find_generations(index_of(to.table))
    ),
    "kv[key] =": lambda to, x, rows: to.any.__setitem__("a", x),
    "put": lambda to, x, rows: to.any.put("a", x),
    "put early": lambda to, x, rows: to.any.put("a", x, return_early=True),
    "put of several": lambda to, x, rows: to.any.put(["b", "a"], [1, x]),
    "put of rows": lambda to, x, rows: to.any.put(["a", "b", "c", "d"], x),
    "put of a dict": lambda to, x, rows: to.any.put("b", {"a": x}),
    "put of a tensordict": lambda to, x, rows: to.any.put("b", rows_of(x)),
    "put of a value": lambda to, x, rows: to.any.put("b", TensorDict({"a": NonTensorData([x])})),
    "update of a kv": lambda to, x, rows: to.any.update({"a": x}),
    "setdefault of a kv": lambda to, x, rows: to.any.setdefault("a2", x),
    "put of a structure": lambda to, x, rows: to.like.put("b", {"a": x}),
    "put of several of a structure": lambda to, x, rows: to.like.put(
        ["b", "c"], [{"a": torch.ones(NUM_ROWS, 4)}, {"a": x}]
    ),
    "put of a tensor": lambda to, x, rows: to.tensor.put("a", x),
}

TAKES_STRUCTURE = {"memmap", "init_remote", "init_remote of a dict", "init_remote nested"}
"""Writes that take a fake tensor for its structure."""


@pytest.mark.filterwarnings("ignore:.*PyTorch API of MaskedTensors")
@pytest.mark.parametrize("kind", KINDS)
def test_tensor_when_it_has_no_bytes_then_every_write_refuses_it_by_key_and_nothing_is_lost(
    stores: Stores, kind: str
) -> None:
    stores.queue.extend(rows_of(torch.ones(NUM_ROWS, 4)))
    leased = stores.queue.take(NUM_ROWS, ack=False)
    wrong: dict[str, str] = {}
    for name, write in WRITES.items():
        if kind == "fake" and name in TAKES_STRUCTURE:
            continue
        seen: list[BaseException | None] = []

        def attempt(given: Given, write: Any = write, seen: list[Any] = seen) -> None:
            try:
                write(stores, *given)
                seen.append(None)
            except Exception as error:  # noqa: BLE001 (it is compared below)
                seen.append(error)

        KINDS[kind](attempt)
        if not isinstance(seen[0], tdserve.NotSupportedError) or not re.search(r"key (\('n', )?'[ab]", str(seen[0])):
            wrong[name] = repr(seen[0])
    assert wrong == {}
    stores.queue.ack(leased)  # the session is the same
    assert (stores.handle["a"] == 1).all()
    assert [*stores.handle.keys()] == ["a", "b"]
    assert (stores.table[:]["a"] == 1).all()
    assert len(stores.table) == NUM_ROWS
    assert [kv.keys() for kv in (stores.any, stores.like, stores.tensor)] == [["a"]] * 3
