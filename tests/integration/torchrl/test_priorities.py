"""Priorities: TorchRL's own sampler with trees in Python, beside a table's, whose priorities the server has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tdserve

pytest.importorskip("torchrl")

from torchrl.data import LazyTensorStorage, ReplayBuffer, TensorDictPrioritizedReplayBuffer, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import (
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    prioritized,
)

from tdserve.torchrl import TDServeStorage
from tests.integration.torchrl.trees import MinTree, SumTree

pytestmark = pytest.mark.integration

MakeStorage = Callable[[], Any]


@pytest.fixture
def trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives TorchRL's sampler trees that work under any torch."""
    for name, tree in (("SumSegmentTreeFp32", SumTree), ("MinSegmentTreeFp32", MinTree)):
        monkeypatch.setattr(prioritized, name, tree)


@pytest.fixture
def make_table(client: tdserve.Client, name: str) -> MakeStorage:
    """Makes storages of one table."""
    return lambda: TDServeStorage(10, address=client, name=name)


def make_rows(*numbers: int) -> TensorDict:
    number = torch.tensor(numbers, dtype=torch.float32)
    return TensorDict({"obs": number, "td_error": torch.ones(len(numbers))}, [len(numbers)])


def find_weights(rows: Any) -> dict[float, float]:
    """The weight of each row, rounded."""
    pairs = zip(rows["obs"].tolist(), rows["priority_weight"].tolist(), strict=True)
    return {number: round(weight, 4) for number, weight in sorted(pairs)}


def learn(make: MakeStorage) -> Any:
    buffer = TensorDictPrioritizedReplayBuffer(alpha=0.7, beta=0.9, storage=make(), batch_size=400)
    buffer.extend(make_rows(*range(5)))
    facts: list[Any] = [find_weights(buffer.sample())]
    rows, info = buffer.sample(return_info=True)
    facts += [sorted(rows.keys()), {key: (value.dtype, tuple(value.shape)) for key, value in info.items()}]
    rows["td_error"] = rows["obs"] + 1
    buffer.update_tensordict_priority(rows)
    facts.append(find_weights(buffer.sample()))
    buffer.update_priority(torch.tensor([0, 1]), torch.tensor([4.0, 2.0]))
    buffer.update_priority(torch.tensor([2]), 0.5)
    facts.append(find_weights(buffer.sample()))
    buffer.sampler.beta = 0.3
    facts.append(find_weights(buffer.sample()))
    buffer.add(make_rows(7)[0].exclude("td_error"))  # the highest priority so far
    facts.append(find_weights(buffer.sample()))
    buffer.empty()
    buffer.extend(make_rows(1, 2))
    return [*facts, find_weights(buffer.sample()), len(buffer), buffer.write_count]


def learn_with_info(make: MakeStorage) -> Any:
    sampler = PrioritizedSampler(10, alpha=1.0, beta=1.0)
    buffer = ReplayBuffer(storage=make(), sampler=sampler, batch_size=200)
    index = buffer.extend(make_rows(0, 1))
    buffer.update_priority(index, torch.tensor([1.0, 4.0]))
    rows, info = buffer.sample(return_info=True)
    sampler.beta = 0.5
    later, later_info = buffer.sample(return_info=True)
    return [
        sorted(zip(part["obs"].tolist(), facts["priority_weight"].tolist(), strict=True))[:: len(part) - 1]
        for part, facts in ((rows, info), (later, later_info))
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("trees")
@pytest.mark.parametrize("program", [learn, learn_with_info], ids=lambda program: str(program.__name__))
def test_program_when_the_storage_is_a_table_then_has_the_same_weights(
    program: Callable[[MakeStorage], Any], make_table: MakeStorage
) -> None:
    assert program(make_table) == program(lambda: LazyTensorStorage(10))


def test_priorities_when_one_process_sets_them_then_all_draw_by_them(make_table: MakeStorage) -> None:
    settings = {"alpha": 1.0, "beta": 1.0, "batch_size": 100}
    first, second = (TensorDictPrioritizedReplayBuffer(storage=make_table(), **settings) for _ in range(2))
    first.extend(make_rows(0, 1, 2))
    second.update_priority(torch.tensor([0, 2]), torch.tensor([1e-6, 1e-6]))
    assert first.sample()["obs"].mean() > 0.9
    third = TensorDictPrioritizedReplayBuffer(storage=make_table(), **settings)  # leaves the priorities as they are
    assert third.sample()["obs"].unique().tolist() == [1.0]


def test_priority_when_the_row_was_overwritten_since_it_was_drawn_then_is_skipped(make_table: MakeStorage) -> None:
    settings = {"alpha": 1.0, "beta": 1.0, "batch_size": 500}
    learner, actor = (TensorDictPrioritizedReplayBuffer(storage=make_table(), **settings) for _ in range(2))
    learner.extend(make_rows(*range(10)))
    drawn = learner.sample()
    actor.extend(make_rows(*range(10, 15)))
    drawn["td_error"] = torch.full((500,), 1e-7)
    learner.update_tensordict_priority(drawn)
    assert learner.sample()["obs"].min() >= 10
    index = learner.extend(make_rows(*range(20, 25)))  # written here: its earlier draws do not count
    learner.update_priority(index, torch.full((5,), 1e7))
    assert learner.sample()["obs"].min() >= 20


def test_priority_when_the_new_row_was_drawn_too_then_the_update_of_the_former_is_skipped(
    make_table: MakeStorage,
) -> None:
    settings = {"alpha": 1.0, "beta": 1.0, "batch_size": 500}
    learner, actor = (TensorDictPrioritizedReplayBuffer(storage=make_table(), **settings) for _ in range(2))
    learner.extend(make_rows(*range(10)))
    former = learner.sample()
    actor.extend(make_rows(*range(10, 20)))
    newer = learner.sample()
    former["td_error"] = torch.full((500,), 1e-7)
    learner.update_tensordict_priority(former)
    assert learner.sample()["obs"].unique().tolist() == list(range(10, 20))
    newer["td_error"] = torch.where(newer["obs"] == 15, 1.0, 1e-7)
    learner.update_tensordict_priority(newer)
    assert learner.sample()["obs"].unique().tolist() == [15.0]


def test_sampler_when_it_contradicts_the_table_then_is_refused_by_name_or_draws_in_this_process(
    make_table: MakeStorage, name: str
) -> None:
    first = TensorDictPrioritizedReplayBuffer(storage=make_table(), alpha=1.0, beta=1.0, batch_size=50)
    first.extend(make_rows(0, 1))
    first.update_priority(torch.tensor([0]), 1e-6)
    even = TensorDictReplayBuffer(storage=make_table(), sampler=RandomSampler(), batch_size=50)
    assert even.sample()["obs"].unique().tolist() == [0.0, 1.0]
    other = TensorDictPrioritizedReplayBuffer(storage=make_table(), alpha=0.5, beta=1.0, batch_size=50)
    with pytest.raises(tdserve.WrongStateError, match=f"alpha=0.5.*{name}.*alpha=1.0"):
        other.sample()
    with pytest.raises(tdserve.NotSupportedError, match=r"alpha .* create another table for 0\.2"):
        first.sampler.alpha = 0.2


@pytest.mark.slow
@pytest.mark.usefixtures("trees")
@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
@pytest.mark.parametrize("is_strict", [True, False])
def test_slices_when_drawn_by_priorities_then_in_this_process(make_table: MakeStorage, *, is_strict: bool) -> None:
    sampler = PrioritizedSliceSampler(
        10, alpha=1.0, beta=1.0, eps=0.0, slice_len=2, traj_key="episode", strict_length=is_strict
    )
    buffer = TensorDictReplayBuffer(storage=make_table(), sampler=sampler, batch_size=8)
    rows = make_rows(*range(6))
    rows["episode"] = torch.tensor([0, 0, 0, 1, 1, 1])
    index = buffer.extend(rows)
    buffer.update_priority(index, torch.tensor([1e-9, 1e-9, 1e-9, 1.0, 1e-9, 1e-9]))
    for _ in range(4):
        assert buffer.sample()["obs"].tolist() == [3.0, 4.0] * 4


@pytest.mark.slow
@pytest.mark.usefixtures("trees")
@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
def test_slices_when_drawn_by_priorities_and_ends_then_none_mixes_rows_of_writers(
    server: tdserve.Server, name: str
) -> None:
    sampler = PrioritizedSliceSampler(
        10, alpha=1.0, beta=1.0, eps=0.0, slice_len=3, end_key=("next", "done"), strict_length=False
    )
    with tdserve.connect(server.address) as own, tdserve.connect(server.address) as other:
        storage = TDServeStorage(20, address=own, name=name)
        buffer = TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=9)
        rows = make_rows(*range(4))
        rows["next", "done"] = torch.zeros(4, 1, dtype=torch.bool)
        index = buffer.extend(rows)
        other[name].extend(rows.clone().apply(lambda leaf: leaf + 50 if leaf.ndim == 1 else leaf))
        buffer.update_priority(index, torch.tensor([1e-9, 1e-9, 1.0, 1e-9]))
        for _ in range(4):
            assert set(buffer.sample()["obs"].tolist()) <= {0.0, 1.0, 2.0, 3.0}


def test_priorities_when_the_table_has_none_then_are_refused(make_table: MakeStorage) -> None:
    even = ReplayBuffer(storage=make_table(), batch_size=50)
    even.extend(make_rows(0, 1))
    ranked = ReplayBuffer(storage=make_table(), sampler=PrioritizedSampler(10, alpha=1.0, beta=1.0), batch_size=2)
    with pytest.raises(tdserve.WrongStateError, match="Uniform"):
        ranked.sample()
    with pytest.raises(tdserve.WrongStateError, match="Uniform"):
        ranked.update_priority(torch.tensor([0]), 1.0)


def test_sampler_when_chosen_for_the_table_then_a_buffer_without_one_draws_by_it(
    client: tdserve.Client, name: str
) -> None:
    storage = TDServeStorage(10, address=client, name=name, sampler=tdserve.Prioritized(alpha=1.0, beta=1.0, eps=0.0))
    buffer = ReplayBuffer(storage=storage, batch_size=8)
    index = buffer.extend(make_rows(0, 1))
    client[name].update_priority(index, torch.tensor([0.0, 1.0]))
    rows, info = buffer.sample(return_info=True)
    assert rows["obs"].unique().tolist() == [1.0]
    assert sorted(info) == ["index", "priority_weight"]


def save_as_state(source: Any, target: Any, _: Path) -> None:
    target.load_state_dict(source.state_dict())


def save_as_files(source: Any, target: Any, folder: Path) -> None:
    source.dumps(folder / "saved")
    target.loads(folder / "saved")


def save_as_storage(source: Any, target: Any, folder: Path) -> None:
    source.storage.dumps(folder)
    target.storage.loads(folder)


@pytest.mark.slow
@pytest.mark.parametrize("save", [save_as_state, save_as_files, save_as_storage])
def test_priorities_when_rows_are_saved_then_come_back_with_them(
    client: tdserve.Client, name: str, tmp_path: Path, save: Any
) -> None:
    def make(table: str) -> Any:
        storage = TDServeStorage(10, address=client, name=table)
        return TensorDictPrioritizedReplayBuffer(alpha=0.7, beta=0.9, storage=storage, batch_size=400)

    source, target = make(name), make(f"{name}-2")
    source.extend(make_rows(*range(13)))  # the oldest row is not the first
    source.update_priority(torch.arange(10), torch.arange(1.0, 11.0))
    expected = dict(
        zip(source[:]["obs"].tolist(), source.storage.table.get_priorities(range(10)).tolist(), strict=True)
    )
    assert expected[10.0] == expected[3.0] - 3 == 1.0
    save(source, target, tmp_path)
    rows, priorities = target[:]["obs"].tolist(), target.storage.table.get_priorities(range(10)).tolist()
    assert dict(zip(rows, priorities, strict=True)) == expected
    assert find_weights(target.sample()) == find_weights(source.sample())
    source.empty()
    save(source, target, tmp_path)
    assert len(target) == 0


def test_priorities_when_asked_for_rows_that_are_not_live_then_refused(client: tdserve.Client, name: str) -> None:
    like = make_rows(0)[0]
    table = client.create_replay(name, like=like, capacity=10, sampler=tdserve.Prioritized())
    index = table.extend(make_rows(1, 2, 3), priority=torch.tensor([1.0, 2.0, 3.0]))
    assert table.get_priorities(index).tolist() == [1.0, 2.0, 3.0]
    assert table.get_priorities([2, 0, 2]).tolist() == [3.0, 1.0, 3.0]
    assert table.get_priorities([]).tolist() == []
    with pytest.raises(tdserve.SelectionError):
        table.get_priorities([3])
    with pytest.raises(tdserve.SelectionError):
        table.get_priorities([10])
    plain = client.create_replay(f"{name}-plain", like=like, capacity=10)
    plain.extend(make_rows(1))
    with pytest.raises(tdserve.InvalidRequestError, match="nor a remover that uses priorities"):
        plain.get_priorities([0])
    client.delete(f"{name}-plain")
