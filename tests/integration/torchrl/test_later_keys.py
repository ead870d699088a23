"""Keys that rows of a buffer bring later, over a table and over TorchRL's own storage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tdserve

pytest.importorskip("torchrl")

from torchrl.data import LazyTensorStorage, ReplayBuffer

from tdserve.torchrl import TDServeStorage

pytestmark = pytest.mark.integration


def make_rows(*numbers: int, **more: torch.Tensor) -> TensorDict:
    """Rows that show their number."""
    obs = torch.tensor(numbers, dtype=torch.float32)
    return TensorDict({"obs": obs, "next": {"obs": obs + 1}, **more}, [len(numbers)])


def list_content(rows: TensorDict) -> dict[Any, Any]:
    """Every leaf with its content, dtype and shape."""
    return {key: (leaf.tolist(), leaf.dtype, tuple(leaf.shape)) for key, leaf in rows.items(True, True)}


def write_keys_later(storage: Any) -> Any:
    """A program whose rows bring keys later; returns all that it has seen."""
    buffer = ReplayBuffer(storage=storage, batch_size=4)
    found = []
    later: dict[Any, torch.Tensor] = {"flat": torch.ones(2), "flag": torch.tensor(True)}
    later["next", "deep"] = torch.tensor(3)
    buffer.extend(make_rows(0, 1))
    for number, (key, value) in enumerate(later.items(), 2):
        buffer.extend(make_rows(number).set(key, value.expand(1, *value.shape)))
        found.append(list_content(buffer[:]))
    buffer.add(make_rows(5)[0])  # lacks them
    buffer[1] = make_rows(11, more=torch.tensor([4]))[0]  # keeps what it has at keys that are not given
    return found, list_content(buffer[:]), sorted(buffer.sample().keys(True, True), key=str)


def test_program_when_keys_come_later_then_does_the_same_over_a_table(client: tdserve.Client, name: str) -> None:
    theirs = write_keys_later(LazyTensorStorage(10))
    assert write_keys_later(TDServeStorage(10, address=client, name=name)) == theirs


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["zeros", "late"])
def test_keys_when_they_come_later_then_all_buffers_have_them_and_zeros_before(
    server: tdserve.Server, client: tdserve.Client, name: str, missing: str
) -> None:
    buffer = ReplayBuffer(storage=TDServeStorage(10, address=client, name=name, missing=missing), batch_size=64)
    other = ReplayBuffer(storage=TDServeStorage(10, address=server.address, name=name), batch_size=64)
    other.extend(make_rows(0))
    buffer.extend(make_rows(1, late=torch.tensor([7])))
    other.extend(make_rows(2))  # by a storage that does not know the key
    other.extend(make_rows(3, late=torch.tensor([9])))
    for each in (buffer, other):
        assert each[:]["late"].tolist() == [0, 7, 0, 9]
        assert set(each.sample()["late"].tolist()) == {0, 7, 9}
    with pytest.raises(tdserve.SpecMismatchError, match="'late'"):
        buffer.extend(make_rows(4, late=torch.zeros(1, 3)))
    assert len(buffer) == 4
