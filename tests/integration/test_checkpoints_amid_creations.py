"""Checkpoints of a server on which stores are made all the time."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from threading import Event, Thread

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tests.processes import wait_for

pytestmark = pytest.mark.integration

LARGE = TensorDict({"body": torch.ones(60, 300)}, [60])
SMALL = TensorDict({"number": torch.tensor(1)}, [])


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("content", [LARGE, SMALL], ids=["large", "small"])
def test_checkpoint_when_stores_are_made_all_the_time_then_ends_and_has_all_before_the_last_of_each(
    server: tdserve.Server, tmp_path: Path, name: str, content: TensorDict
) -> None:
    """Stores with files, which are read one by one, and small ones without."""
    is_over, made = Event(), Counter[int]()

    def create(maker: int) -> None:
        with server.client(transport="gloo") as making:
            while not is_over.is_set():
                making.init_remote(content, f"{name}-{maker}-{made[maker]}")
                made[maker] += 1

    makers = [Thread(target=create, args=(maker,)) for maker in range(2)]
    for thread in makers:
        thread.start()
    try:
        wait_for(lambda: min(made[0], made[1]) >= 20, "stores")
        before = made.copy()
        with server.client() as client:
            checkpoint = client.checkpoint(tmp_path / "place", timeout_s=200.0)
        num_later = made.total()
        wait_for(lambda: made.total() >= num_later + 40, "stores that are made at full speed again")
    finally:
        is_over.set()
        for thread in makers:
            thread.join()
    kept = [tuple(map(int, each.name.split("-")[-2:])) for each in checkpoint.stores if each.name.startswith(name)]
    for maker in range(2):
        numbers = [number for by, number in kept if by == maker]
        assert sorted(numbers) == list(range(len(numbers)))
        assert len(numbers) >= before[maker]


def test_checkpoint_when_a_store_is_deleted_meanwhile_then_is_not_named_as_left_out(
    server: tdserve.Server, client: tdserve.Client, tmp_path: Path, name: str
) -> None:
    names = [f"{name}-{number}" for number in range(3)]
    for each in names:
        client.init_remote(LARGE, each)
    left = {names[1]}

    def delete(_: object) -> None:
        while left:
            client.delete(left.pop())

    with server.client() as other:
        checkpoint = other.checkpoint(tmp_path / "place", on_progress=delete)
    assert checkpoint.left_out == []
    assert {each.name for each in checkpoint.stores} & {*names} == {names[0], names[2]}
