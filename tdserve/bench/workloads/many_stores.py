"""Small stores, made and deleted one by one: beside few others, and beside thousands, which must make no difference."""

from __future__ import annotations

from collections.abc import Generator
from itertools import count

import torch
from tensordict import TensorDict

from tdserve.base.errors import CorruptDataError
from tdserve.bench.figures import Scale
from tdserve.bench.measure import make_task
from tdserve.bench.stage import Case, Stage


def measure_many_stores(stage: Stage) -> Generator[Case]:
    """Measures the creation of a store with one scalar, and its deletion."""
    client, numbers, made = stage.client, count(), list[str]()
    item = TensorDict({"x": torch.zeros(())}, [])

    def create() -> str:
        name = f"made-{next(numbers):07d}"
        client.init_remote(item, name)
        made.append(name)
        return name

    def check(name: str) -> None:
        if name not in client:
            raise CorruptDataError(path=name, expected="a store of this name", actual="none")

    def delete() -> None:
        client.delete(made.pop())

    def measure(beside: str) -> Generator[Case]:
        yield Case(f"create a store{beside}", Scale("us"), make_task(create, check))
        yield Case(f"delete a store{beside}", Scale("us"), make_task(delete, before=create))

    yield from measure("")
    while len(made) < stage.sizes.num_many_stores:
        create()
    yield from measure(f" beside {stage.sizes.num_many_stores:,}")
    while made:
        delete()
