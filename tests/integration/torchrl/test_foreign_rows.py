"""Files that TorchRL's own storages have written, and rows that a table does not have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tdserve

pytest.importorskip("torchrl")

from torchrl.data import LazyTensorStorage, ReplayBuffer

from tdserve.torchrl import TDServeStorage

pytestmark = pytest.mark.integration


def make_rows(*numbers: int) -> TensorDict:
    return TensorDict({"obs": torch.tensor(numbers, dtype=torch.float32)}, [len(numbers)])


def test_files_when_another_storage_has_written_tensors_then_are_read(
    client: tdserve.Client, name: str, tmp_path: Path
) -> None:
    theirs = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=2)
    theirs.extend(torch.arange(8).reshape(4, 2))
    theirs.storage.dumps(tmp_path)
    ours = ReplayBuffer(storage=TDServeStorage(10, address=client, name=name), batch_size=2)
    ours.storage.loads(tmp_path)
    assert ours[:].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_files_when_their_rows_are_no_tensordicts_then_are_refused(
    client: tdserve.Client, name: str, tmp_path: Path
) -> None:
    theirs = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=2)
    theirs.extend({"x": torch.zeros(3), "y": torch.zeros(3)})
    theirs.storage.dumps(tmp_path)
    with pytest.raises(tdserve.InvalidRequestError, match="no tensordicts"):
        TDServeStorage(10, address=client, name=name).loads(tmp_path)


def test_rows_when_those_that_replace_them_do_not_fit_then_stay(
    client: tdserve.Client, name: str, tmp_path: Path
) -> None:
    storage = TDServeStorage(10, address=client, name=name, sampler=tdserve.Prioritized())
    storage.extend(make_rows(1, 2, 3))
    theirs = LazyTensorStorage(10)
    theirs.set(range(4), TensorDict({"obs": torch.zeros(4, 2)}, [4]))
    theirs.dumps(tmp_path)
    with pytest.raises(tdserve.SpecMismatchError):
        storage.loads(tmp_path)
    with pytest.raises(tdserve.SpecMismatchError):
        storage.load_state_dict(theirs.state_dict())
    with pytest.raises(tdserve.InvalidRequestError):
        storage.replace_rows(make_rows(4, 5), torch.tensor([1.0, -1.0]))
    assert storage[:]["obs"].tolist() == [1.0, 2.0, 3.0]
    many = make_rows(*range(15))
    with pytest.raises(tdserve.InvalidRequestError):
        storage.replace_rows(many, torch.tensor([1.0] * 14 + [-1.0]))
    assert storage[:]["obs"].tolist() == [1.0, 2.0, 3.0]
    storage.replace_rows(many, torch.ones(15))
    assert sorted(storage[:]["obs"].tolist()) == list(range(5, 15))
    storage.replace_rows(make_rows(4, 5), torch.tensor([1.0, 2.0]))
    assert storage[:]["obs"].tolist() == [4.0, 5.0]


def test_keys_when_changed_after_rows_have_left_then_of_the_rows_that_are_left(
    client: tdserve.Client, name: str
) -> None:
    buffer = ReplayBuffer(storage=TDServeStorage(10, address=client, name=name), batch_size=2)
    buffer.extend(make_rows(*range(6)))
    buffer.storage.table.delete(torch.tensor([0, 1, 3]))
    buffer.set_("obs", torch.tensor([12.0, 14.0, 15.0]))
    assert buffer[:]["obs"].tolist() == [12.0, 14.0, 15.0]
    changes = [
        (torch.tensor([5, 2]), [22.0, 14.0, 25.0]),
        (-1, [22.0, 14.0, 35.0]),
        (slice(3, 5), [22.0, 44.0, 35.0]),
        (torch.tensor([True, False, False]), [52.0, 44.0, 35.0]),
    ]
    values = [torch.tensor([25.0, 22.0]), torch.tensor(35.0), torch.tensor([44.0]), torch.tensor([52.0])]
    for (index, expected), value in zip(changes, values, strict=True):
        buffer.set_at_("obs", value, index)
        assert buffer[:]["obs"].tolist() == expected
    buffer.update_({"obs": torch.tensor([62.0, 64.0, 65.0])})
    assert buffer[torch.tensor([2, 4, 5])]["obs"].tolist() == [62.0, 64.0, 65.0]
    with pytest.raises(tdserve.SelectionError):
        buffer.set_at_("obs", torch.tensor([0.0]), torch.tensor([3]))


@pytest.mark.slow
@pytest.mark.parametrize("data", [{"x": torch.ones(2)}, [{"x": torch.ones(())}], (torch.ones(2),), [1, 2], []], ids=str)
def test_rows_when_they_are_no_tensordicts_then_are_refused(client: tdserve.Client, name: str, data: Any) -> None:
    buffer = ReplayBuffer(storage=TDServeStorage(10, address=client, name=name), batch_size=2)
    for write in (buffer.extend, buffer.add):
        with pytest.raises(tdserve.InvalidRequestError):
            write(data)
    buffer.extend(make_rows(1, 2))
    with pytest.raises(tdserve.InvalidRequestError):
        buffer[:2] = data
    with pytest.raises(tdserve.InvalidRequestError, match="3 rows for 2"):
        buffer[:2] = make_rows(3, 4, 5)
    assert buffer[:]["obs"].tolist() == [1.0, 2.0]
