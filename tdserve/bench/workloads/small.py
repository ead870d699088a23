"""Small things: a scalar by key, a small tensordict by name, the keys of a store, the names of many. The cost of one
question."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from itertools import cycle
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tensordict import TensorDict

from tdserve.base.errors import CorruptDataError
from tdserve.bench.figures import Scale
from tdserve.bench.floor_link import REQUEST_NBYTES
from tdserve.bench.floors import LOCAL_MEMMAP
from tdserve.bench.measure import make_task
from tdserve.bench.stage import Case, Stage

KEY_STRIDE = 37
"""Keys are asked for in steps of a prime: never the same one twice in a row, and the same ones in every run."""

STORE = "items"


def measure_small(stage: Stage) -> Generator[Case]:
    """Measures a store of scalars under many keys, and a few hundred stores."""
    client = stage.client
    names = [f"k{i}" for i in range(stage.sizes.num_items)]
    items = TensorDict({name: torch.tensor(float(i)) for i, name in enumerate(names)}, [])
    client.init_remote(items, STORE)
    with TemporaryDirectory(dir=stage.folder) as folder:
        yield _get_one(stage, items, items.memmap(folder))
    yield _list(stage, names, f"keys of a store of {len(names):,}", lambda: client.keys(STORE))
    client.delete(STORE)
    yield from _exchange(stage)

    names = [f"store-{i:05d}" for i in range(stage.sizes.num_stores)]
    for name in names:
        client.init_remote(TensorDict({"x": torch.zeros(())}, []), name)
    yield _list(stage, names, f"names of {len(names)} stores", client.stores)
    for name in names:
        client.delete(name)


def _get_one(stage: Stage, items: TensorDict, local: TensorDict) -> Case:
    handle, num_items = stage.client[STORE], len(items.keys())
    numbers = cycle([i * KEY_STRIDE % num_items for i in range(num_items)])

    def get() -> tuple[int, torch.Tensor]:
        number = next(numbers)
        return number, handle[f"k{number}"]

    def check(last: tuple[int, torch.Tensor]) -> None:
        number, value = last
        if value.item() != number:
            raise CorruptDataError(path=f"item k{number}", expected=str(float(number)), actual=str(value))

    floors = {LOCAL_MEMMAP: make_task(lambda: torch.clone(local[f"k{next(numbers)}"]))}
    if stage.transport == "gloo":
        floors = {"gloo round trip": stage.link.make_floor(out=REQUEST_NBYTES, back=REQUEST_NBYTES), **floors}
    return Case(f"get one scalar of {num_items:,}", Scale("us"), make_task(get, check), floors)


def _exchange(stage: Stage) -> Generator[Case]:
    """Measures reads and writes of a whole store of some hundred bytes."""
    client = stage.client
    contents = [TensorDict({"a": torch.full((4, 16), i), "b": torch.full((4,), i)}, [4]) for i in range(2)]
    client.init_remote(contents[0], STORE)
    content = cycle(contents)
    nbytes = contents[0].bytes()
    read_floor, write_floor = (
        {"gloo round trip": stage.link.make_floor(out=out, back=back)} if stage.transport == "gloo" else {}
        for out, back in ((REQUEST_NBYTES, nbytes), (nbytes, REQUEST_NBYTES))
    )

    def check(found: TensorDict) -> None:
        if not any(bool((found == each).all()) for each in contents):
            raise CorruptDataError(path=STORE, expected="one of what was written", actual=str(found["b"].tolist()))

    def write() -> TensorDict:
        written = next(content)
        client.send(written, STORE)
        return written

    def check_written(written: TensorDict) -> None:
        if not bool((client.from_remote_init(STORE) == written).all()):
            raise CorruptDataError(path=STORE, expected="what was written last", actual="something else")

    read = make_task(lambda: client.from_remote_init(STORE), check)
    yield Case("read a small tensordict by name", Scale("us"), read, read_floor)
    yield Case("send a small tensordict", Scale("us"), make_task(write, check_written), write_floor)
    client.delete(STORE)


def _list(stage: Stage, expected: list[str], name: str, ask: Callable[[], Iterable[Any]]) -> Case:
    """Compares any collection of names with those expected, in whatever order."""

    def check(found: list[Any]) -> None:
        if sorted(found) != sorted(expected):
            raise CorruptDataError(path=name, expected=f"{len(expected)} names", actual=f"{len(found)}, other names")

    nbytes = sum(len(each) + 1 for each in expected)
    floors = {"gloo, as many bytes": stage.link.make_floor(out=REQUEST_NBYTES, back=nbytes)}
    return Case(name, Scale("ms"), make_task(lambda: list(ask()), check), floors)
