"""Keyed stores: entries that are put and read one by one, many at once, and many under way."""

from __future__ import annotations

from collections.abc import Generator
from itertools import cycle
from typing import Any

import torch

from tdserve.base.errors import CorruptDataError
from tdserve.bench.figures import Scale
from tdserve.bench.floor_link import REQUEST_NBYTES
from tdserve.bench.measure import make_pipeline, make_task
from tdserve.bench.stage import Case, Stage

NUM_PUTS_UNDER_WAY = 16

BATCH_KEYS = 256

KEY_STRIDE = 37
"""As in ``small``: never the same key twice in a row."""

STORE, LIKE_STORE = "kv", "kv-like"


def measure_keyed(stage: Stage) -> Generator[Case]:
    """Measures a store of scalars of any structure, and one of scalars of one structure for batches."""
    keys = [f"k{number}" for number in range(stage.sizes.num_items)]
    content = torch.arange(float(len(keys)))
    yield from _measure_single(stage, keys, content)
    stage.client.delete(STORE)
    yield from _measure_batches(stage, keys, content)
    stage.client.delete(LIKE_STORE)


def _measure_single(stage: Stage, keys: list[str], content: torch.Tensor) -> Generator[Case]:
    kv, num_keys = stage.client.create_kv(STORE), len(keys)
    kv.put(keys, content)
    numbers = cycle([number * KEY_STRIDE % num_keys for number in range(num_keys)])

    def get() -> tuple[int, torch.Tensor]:
        number = next(numbers)
        return number, kv[keys[number]]

    def check(last: tuple[int, torch.Tensor]) -> None:
        number, value = last
        if value.item() != number:
            raise CorruptDataError(path=f"entry k{number}", expected=str(float(number)), actual=str(value))

    def put(*, return_early: bool = False) -> Any:
        number = next(numbers)
        return kv.put(keys[number], content[number], return_early=return_early)

    floors = {}
    if stage.transport == "gloo":
        floors["gloo round trip"] = stage.link.make_floor(out=REQUEST_NBYTES, back=REQUEST_NBYTES)
    yield Case(f"get one scalar of {num_keys:,}", Scale("us"), make_task(get, check), floors)
    yield Case("put one scalar", Scale("us"), make_task(put), floors)
    early = make_pipeline(lambda: put(return_early=True), NUM_PUTS_UNDER_WAY)
    yield Case(f"put one scalar, {NUM_PUTS_UNDER_WAY} under way", Scale("rows/s"), early)


def _measure_batches(stage: Stage, keys: list[str], content: torch.Tensor) -> Generator[Case]:
    kv = stage.client.create_kv(LIKE_STORE, like=torch.zeros(()))
    kv.put(keys, content)
    starts = range(0, len(keys) - BATCH_KEYS + 1, BATCH_KEYS)
    batches = cycle([(keys[at : at + BATCH_KEYS], content[at : at + BATCH_KEYS]) for at in starts])

    def get() -> tuple[torch.Tensor, torch.Tensor]:
        names, expected = next(batches)
        return expected, kv.get(names)

    def check(last: tuple[torch.Tensor, torch.Tensor]) -> None:
        expected, found = last
        if not torch.equal(expected, found):
            raise CorruptDataError(path="entries", expected=str(expected), actual=str(found))

    scale = Scale("rows/s", BATCH_KEYS)
    early = make_pipeline(lambda: kv.put(*next(batches), return_early=True), NUM_PUTS_UNDER_WAY)
    yield Case(f"put {BATCH_KEYS} scalars, {NUM_PUTS_UNDER_WAY} under way", scale, early)
    yield Case(f"get {BATCH_KEYS} scalars", scale, make_task(get, check))
