"""The operations that are tried with a store, a table or weights of every kind: each by name, with the result that it
must give."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from typing import Any, NamedTuple

import torch
from tensordict import TypedTensorDict, is_tensorclass
from tensordict.nn import TensorDictParams

import tdserve
from tests.conformance.kind import ROWS, Kind, by_tensordict
from tests.sameness import difference

INDICES: tuple[Any, ...] = (2, slice(1, 3), [2, 0], torch.arange(ROWS) % 2 == 0)

PLACES: tuple[tuple[Any, Any], ...] = (
    (2, 0),
    (slice(1, 3), slice(0, 2)),
    ([2, 0], [1, 3]),
    (torch.arange(ROWS) == 1, slice(2, 3)),
)
"""Rows that are written, each with the rows of the example that replace them."""


class Trial:
    """One kind under trial by one client. The names of its stores begin with ``name``."""

    def __init__(self, client: tdserve.Client, name: str, kind: Kind) -> None:
        self.client = client
        self.name = name
        self.kind = kind

    @cached_property
    def store(self) -> Any:
        """A store that ``init_remote`` made. Operations leave it as it was."""
        self.client.init_remote(self.kind.make(), self.name)
        return self.client[self.name]

    def fresh(self, what: str) -> str:
        """Returns a name for a store that only one operation uses."""
        return f"{self.name}-{what}"

    @property
    def expected(self) -> Any:
        """Returns what a read of a whole example must return."""
        return self.kind.expected(self.kind.make())

    def row_of(self, td: Any, number: int) -> Any:
        """Returns one row of what was read."""
        with by_tensordict():
            return td[number] if self.kind.local is None else self.kind.local(td, number)

    def rows(self, index: Any) -> Any:
        """Returns rows as a table keeps them. A table keeps content only: no locks, nothing that requires grad."""
        td = self.kind.rows(index)
        with by_tensordict():
            return unlocked(td.detach())


class Operation(NamedTuple):
    """One operation.

    Attributes:
        attempt: Runs it; fails if the result is not the expected one.
        column: Its column in the guide's table.
        on_rows: Whether it applies only to kinds with rows.
        needs: The transport without which it is refused.
    """

    attempt: Callable[[Trial], None]
    column: str
    on_rows: bool = False
    needs: str = ""


OPERATIONS: dict[str, Operation] = {}
"""Every operation by its name."""


def operation(
    column: str, *, on_rows: bool = False, needs: str = ""
) -> Callable[[Callable[[Trial], None]], Callable[[Trial], None]]:
    """Puts a function into the table; arguments as in ``Operation``."""

    def enter(attempt: Callable[[Trial], None]) -> Callable[[Trial], None]:
        OPERATIONS[attempt.__name__] = Operation(attempt, column, on_rows, needs)
        return attempt

    return enter


def check_same(found: Any, expected: Any, where: str) -> None:
    """Fails with the first difference and the place of the comparison."""
    text = difference(found, expected)
    assert text is None, f"{where}: {text}"


def unlocked(td: Any) -> Any:
    """Returns the same tensordict, unlocked."""
    return td.unlock_() if td.is_locked else td


def published(td: Any) -> Any:
    """Returns the content of a tensordict: plain tensors, in plain tensordicts instead of TensorDictParams."""
    if not is_tensorclass(td):
        with by_tensordict():
            td = (td._param_td if isinstance(td, TensorDictParams) else td).data
    return td.lock_().unlock_()  # below it too


def without_class(td: Any) -> Any:
    """Converts an instance to the TensorDict that has its keys; returns anything else unchanged."""
    if isinstance(td, TypedTensorDict):
        return td._source
    if not is_tensorclass(td):
        return td
    with by_tensordict():
        inside = td._tensordict.copy()
    for key, value in (td._non_tensordict or {}).items():
        inside.set_non_tensor(key, value)
    return inside


@operation("whole")
def init_remote(trial: Trial) -> None:
    """Creates a store and reads it in every way."""
    store = trial.store
    check_same(trial.client.from_remote_init(trial.name), trial.expected, "from_remote_init")
    check_same(store.to_tensordict(), trial.expected, "to_tensordict")


@operation("whole")
def memmap(trial: Trial) -> None:
    """Calls the family of ``memmap``."""
    name = trial.fresh("memmap")
    trial.client.memmap(trial.kind.make(), name)
    check_same(trial.client.load_memmap(name), trial.expected, "load_memmap")


@operation("whole")
def send(trial: Trial) -> None:
    """Sends content again, and receives it into existing tensors."""
    name = trial.fresh("send")
    trial.client.init_remote(trial.kind.make(), name)
    version = trial.client.send(trial.kind.make(), name)
    check_same(trial.client.from_remote_init(name), trial.expected, "sent")
    into = unlocked(trial.expected)  # ragged entries replace the existing ones, which a lock forbids
    assert trial.client.recv(into, name) == version
    check_same(into, unlocked(trial.expected), "recv")


@operation("whole")
def out(trial: Trial) -> None:
    """Fills existing tensors in place."""
    assert trial.store is not None
    into = unlocked(trial.expected)
    assert trial.client.from_remote_init(trial.name, out=into) is into
    check_same(into, unlocked(trial.expected), "out")


@operation("part (`keys=`)")
def keys(trial: Trial) -> None:
    """Reads the entries of the root one after the other."""
    assert trial.store is not None
    for key in list(without_class(trial.expected).keys()):
        expected = trial.expected
        with by_tensordict():  # packed entries are selected from
            found = trial.client.from_remote_init(trial.name, keys=[key])
        assert type(found) is type(expected) or isinstance(expected, TensorDictParams)
        if isinstance(expected, TensorDictParams):  # these cannot be selected from while they are locked
            expected.unlock_()
        with by_tensordict():
            part = without_class(expected).select(key, strict=False)  # for an instance it runs ``__post_init__``
        check_same(without_class(found), part, f"keys {key!r}")


@operation("part (`keys=`)")
def write_keys(trial: Trial) -> None:
    """Writes the entries of the root one after the other, over equal ones."""
    name = trial.fresh("keys")
    trial.client.init_remote(trial.kind.make(), name)
    handle = trial.client[name]
    for key in list(without_class(trial.expected).keys()):
        if handle.spec.root.inner is not None or handle.spec.root.stack_dim is not None:
            continue  # entries whose rows differ in structure or size are written as a whole
        value = without_class(trial.kind.make()).get(key)
        handle.set_(key, value)
        handle.update_({key: value})
        with suppress(tdserve.LockedError):  # like a local tensordict that is locked somewhere
            handle.update({key: value})
        check_same(handle.to_tensordict(), trial.expected, f"over {key!r}")


@operation("rows: read", on_rows=True)
def read_rows(trial: Trial) -> None:
    """Reads rows as tensordict's own indexing does."""
    for index in INDICES:
        check_same(trial.store[index], trial.kind.rows(index), f"rows {index}")


@operation("rows: write", on_rows=True)
def write_rows(trial: Trial) -> None:
    """Overwrites rows by other rows of the example, with every kind of index."""
    name = trial.fresh("write")
    trial.client.init_remote(trial.kind.make(), name)
    handle = trial.client[name]
    sources = torch.arange(ROWS)
    for place, source in PLACES:
        handle[place] = trial.kind.rows(source)
        sources[place] = torch.arange(ROWS)[source]
        check_same(handle[list(range(ROWS))], trial.kind.rows(sources.tolist()), f"rows {place}")


@operation("rows: write", on_rows=True)
def write_elements(trial: Trial) -> None:
    """Overwrites single elements where rows have more than one dimension, and reads each element."""
    if len(trial.store.spec.batch_size) < 2:  # rows of stacks can only be written whole
        return
    name = trial.fresh("elements")
    trial.client.init_remote(trial.kind.make(), name)
    handle = trial.client[name]
    for place, source in (((2, 1), (0, 0)), ((slice(1, 3), 1), (slice(0, 2), 0)), ((..., 0), (..., 1))):
        expected = trial.kind.rows(source)
        check_same(trial.store[source], expected, f"element {source}")
        handle[place] = expected
        check_same(handle[place], expected, f"element {place}")


@operation("replay, queue", on_rows=True)
def replay(trial: Trial) -> None:
    """Extends a table; reads the rows by number and samples them."""
    table = trial.client.create_replay(trial.fresh("replay"), trial.kind.rows(0), 2 * ROWS, ragged=trial.kind.ragged)
    index = table.extend(trial.kind.make())
    assert index.tolist() == list(range(ROWS))
    drawn = table.sample(3)
    found = table[index]
    for number in range(ROWS):
        check_same(trial.row_of(found, number), trial.rows(number), f"row {number}")
    for number, row in enumerate(drawn["index"].tolist()):
        check_drawn(trial.row_of(drawn, number), trial.rows(row), f"drawn {row}")


@operation("replay, queue", on_rows=True)
def queue(trial: Trial) -> None:
    """Extends a queue and takes the rows in order."""
    table = trial.client.create_queue(trial.fresh("queue"), trial.kind.rows(0), 2 * ROWS)
    table.extend(trial.kind.make())
    with table.take(ROWS) as found:
        for number in range(ROWS):
            check_drawn(trial.row_of(found, number), trial.rows(number), f"row {number}")


def check_drawn(found: Any, expected: Any, where: str) -> None:
    """Compares a sampled row. If it has more keys than its class, it is a TensorDict."""
    with by_tensordict():
        check_same(found.exclude("index", "generation"), without_class(expected), where)


@operation("weights")
def publish(trial: Trial) -> None:
    """Publishes weights, which are content only."""
    name = trial.fresh("weights")
    trial.client.publish(name, trial.kind.make())
    found = trial.client.latest(name)
    assert found is not None
    check_same(found.data, published(trial.expected), "latest")
    into = published(trial.expected)
    trial.client.latest(name, out=into)
    check_same(into, published(trial.expected), "latest into")


@operation("keyed entries")
def put_and_get(trial: Trial) -> None:
    """Puts an entry of a keyed store, alone and with others, whose entries are content only."""
    entries = trial.client.create_kv(trial.fresh("entries"))
    entries.put("a", trial.kind.make())
    entries.put(["b", "c"], [trial.kind.make(), 1])
    for found in (entries.get("a"), *entries.get(["a", "b"])):
        check_same(found, published(trial.expected), "get")


@operation("live values")
def share_non_tensor(trial: Trial) -> None:
    """Reads values that are read again at each access, and a snapshot of them."""
    name = trial.fresh("live")
    handle = trial.client.memmap(trial.kind.make(), name, share_non_tensor=True)
    check_same(handle.to_tensordict(), trial.expected, "to_tensordict")
    loaded = trial.client.load_memmap(name)
    assert type(loaded) is type(trial.expected)
    assert list(without_class(loaded).keys()) == list(without_class(trial.expected).keys())


@operation("`map()`", needs="shm")
def map_(trial: Trial) -> None:
    """Maps the store's own memory, which is locked."""
    check_same(trial.store.map(), trial.expected.lock_(), "map")
