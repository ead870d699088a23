"""Programs over TorchRL's own storage and over a table: each gives the same result with both."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict, tensorclass

import tdserve

pytest.importorskip("torchrl")

from torchrl.data import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import RandomSampler, SamplerWithoutReplacement
from torchrl.data.replay_buffers.writers import ImmutableDatasetWriter, TensorDictMaxValueWriter
from torchrl.envs.transforms import RenameTransform

from tdserve.torchrl import TDServeStorage
from tests.integration.torchrl.program_rows import MakeStorage, describe, make_rows
from tests.integration.torchrl.slice_programs import SLICE_PROGRAMS

pytestmark = pytest.mark.integration


@tensorclass
class Step:
    """A row that is an instance."""

    obs: torch.Tensor
    action: torch.Tensor


def write_and_read(make: MakeStorage, _: Path) -> Any:
    buffer = ReplayBuffer(storage=make(), batch_size=4)
    written = [buffer.extend(make_rows(*range(6))).tolist(), buffer.extend(make_rows(*range(6, 12))).tolist()]
    added = buffer.add(make_rows(12)[0])
    buffer[3] = make_rows(33)[0]
    buffer[4:6] = make_rows(34, 35)
    read = [buffer[index]["obs"].tolist() for index in (0, slice(2, 5), torch.tensor([1, 7]), range(3))]
    counts = len(buffer), buffer.write_count, buffer.stats(), len(list(buffer.storage)), 3 in buffer.storage
    return written, added, read, counts, buffer[:]["next", "obs"].tolist(), buffer["obs"].tolist()


def change_rows(make: MakeStorage, _: Path) -> Any:
    buffer = TensorDictReplayBuffer(storage=make(), batch_size=4)
    buffer.extend(make_rows(*range(10)))
    key = ("next", "obs")
    changes: list[Callable[[], Any]] = [
        lambda: buffer.set_at_("obs", torch.tensor([11.0, 12.0]), torch.tensor([1, 2])),
        lambda: buffer.set_at_("obs", torch.tensor(19.0), 9),
        lambda: buffer.set_at_(key, torch.tensor([17.0, 18.0]), slice(-2, None)),
        lambda: buffer.set_at_(key, torch.tensor([20.0]), torch.arange(10) == 4),
        lambda: buffer.set_(key, torch.arange(10.0) * 2),
        lambda: buffer.update_({"obs": torch.arange(10.0) * 3}),
        lambda: buffer.update_(make_rows(*range(40, 50)), keys_to_update=[key]),
    ]
    found = []
    for change in changes:
        assert change() is buffer
        found.append((buffer[:]["obs"].tolist(), buffer[:][key].tolist()))
    with pytest.raises(IndexError):
        buffer.set_at_("obs", torch.tensor([0.0]), torch.tensor([10]))
    with pytest.raises(KeyError):
        buffer.set_("other", torch.zeros(10))
    sent = pickle.loads(pickle.dumps(buffer))
    assert sent.set_("obs", torch.arange(10.0)) is sent
    return found, sent[:]["obs"].tolist()


def replace_rows(make: MakeStorage, _: Path) -> Any:
    buffer = ReplayBuffer(storage=make(), batch_size=4)
    buffer.extend(make_rows(*range(10)))
    buffer[1] = TensorDict({"obs": torch.tensor(21.0)})  # the other keys stay
    buffer[torch.tensor([[2], [4]])] = make_rows(22, 24).unsqueeze(1)
    buffer[torch.arange(10) > 7] = make_rows(28, 29)
    buffer[5:7] = make_rows(25, 26)
    found = buffer[:]["obs"].tolist(), buffer[:]["next", "obs"].tolist()
    buffer[:] = make_rows(*range(30, 40))
    return found, buffer[:]["obs"].tolist()


def ask_for_rows(make: MakeStorage, _: Path) -> Any:
    storage = make()
    buffer = ReplayBuffer(storage=storage, batch_size=4)
    asked = [0, 3, 4, -1, -4, -5]
    answers = [[number in storage for number in asked] for _ in (buffer.extend(make_rows(*range(4))),)]
    buffer.empty()
    answers.append([number in storage for number in asked])
    buffer.extend(make_rows(*range(12)))
    return answers, storage.contains(torch.tensor([9, 10, -10, -11])).tolist(), storage.contains(torch.tensor(3)).item()


def sample_with_info(make: MakeStorage, _: Path) -> Any:
    buffer = ReplayBuffer(storage=make(), sampler=RandomSampler(), batch_size=64)
    buffer.extend(make_rows(*range(8)))
    rows, info = buffer.sample(return_info=True)
    assert (rows["obs"] == info["index"]).all()
    assert set(rows["obs"].tolist()) == set(range(8))
    return describe(rows), {key: (value.dtype, tuple(value.shape)) for key, value in info.items()}


def sample_tensordicts(make: MakeStorage, _: Path) -> Any:
    buffer = TensorDictReplayBuffer(storage=make(), batch_size=5, prefetch=2, transform=RenameTransform(["obs"], ["x"]))
    index = buffer.extend(make_rows(*range(6)))
    samples = [buffer.sample() for _ in range(4)]
    for rows in samples:
        assert (rows["x"] == rows["index"]).all()
    buffer.shutdown()
    return index.tolist(), [describe(rows) for rows in samples]


def use_a_sampled_batch_again(make: MakeStorage, _: Path) -> Any:
    buffer = TensorDictReplayBuffer(storage=make(), batch_size=3)
    buffer.extend(make_rows(*range(5)))
    rows = buffer.sample()
    before = buffer[rows["index"]]["obs"]
    buffer[rows["index"]] = make_rows(7, 7, 7)
    return (before == rows["obs"]).all().item(), buffer[rows["index"]]["obs"].tolist(), buffer.extend(rows).tolist()


def fail_while_empty(make: MakeStorage, _: Path) -> Any:
    buffer = ReplayBuffer(storage=make(), batch_size=4)
    with pytest.raises(RuntimeError, match="Cannot sample from an empty storage") as refused:
        buffer.sample()
    buffer.extend(make_rows(*range(5)))
    buffer.empty()
    with pytest.raises(RuntimeError, match="Cannot sample from an empty storage"):
        buffer.sample()
    counts = len(buffer), buffer.write_count
    index = buffer.extend(make_rows(8, 9)).tolist()
    buffer.empty(empty_write_count=False)
    return str(refused.value), counts, index, len(buffer), buffer.write_count


def write_keys(make: MakeStorage, _: Path) -> Any:
    buffer = TensorDictReplayBuffer(storage=make(), batch_size=4)
    rows = make_rows(*range(10))  # TorchRL loses what is written to a storage that is not full
    rows["next", "obs"] = torch.zeros(10)
    buffer.extend(rows)
    buffer["obs"] = torch.arange(10.0) * 10
    buffer["next", "obs"] = torch.ones(10)
    buffer[("obs",)] = buffer["obs"] + 1
    with pytest.raises((KeyError, RuntimeError, IndexError, ValueError)):
        buffer["obs"] = torch.zeros(3)
    return buffer["obs"].tolist(), buffer["next", "obs"].tolist(), buffer[1]["obs"].item()


def restore_state(make: MakeStorage, _: Path) -> Any:
    first, second = (TensorDictReplayBuffer(storage=make(), batch_size=4) for _ in range(2))
    first.extend(make_rows(*range(5)))
    state = first.state_dict()
    second.load_state_dict(state)
    first.empty()
    return len(second), second[:]["obs"].tolist(), second.add(make_rows(5)[0]), second.write_count, len(first)


def restore_files(make: MakeStorage, folder: Path) -> Any:
    first, second = (TensorDictReplayBuffer(storage=make(), batch_size=4) for _ in range(2))
    first.extend(make_rows(*range(5)))
    first.dumps(folder / "buffer")
    second.loads(folder / "buffer")
    second.dumps(folder / "again")
    first.load(folder / "again")
    return len(second), second[:]["obs"].tolist(), first[:]["obs"].tolist(), second.extend(make_rows(5, 6)).tolist()


def pass_in_epochs(make: MakeStorage, _: Path) -> Any:
    found = []
    for drop_last in (False, True):
        sampler = SamplerWithoutReplacement(drop_last=drop_last)
        buffer = ReplayBuffer(storage=make(), sampler=sampler, batch_size=4, prefetch=2)
        buffer.extend(make_rows(*range(10)))
        for _epoch in range(2):
            batches = [rows["obs"].tolist() for rows in buffer]
            seen = [number for batch in batches for number in batch]
            assert len(set(seen)) == len(seen)
            found.append([len(batch) for batch in batches])
        buffer.shutdown()
    return found


def pass_in_order(make: MakeStorage, _: Path) -> Any:
    sampler = SamplerWithoutReplacement(shuffle=False)
    buffer = ReplayBuffer(storage=make(), sampler=sampler, batch_size=3)
    buffer.extend(make_rows(*range(7)))
    return [rows["obs"].tolist() for rows in buffer]


def store_tensors(make: MakeStorage, _: Path) -> Any:
    buffer = ReplayBuffer(storage=make(), batch_size=20)
    index = buffer.extend(torch.arange(5) * 2).tolist()
    rows, info = buffer.sample(return_info=True)
    assert (rows == info["index"] * 2).all()
    return index, buffer[:].tolist(), buffer[3].item(), buffer.add(torch.tensor(9)), tuple(rows.shape)


def store_lists(make: MakeStorage, _: Path) -> Any:
    buffer = ReplayBuffer(storage=make(), batch_size=2)
    index = buffer.extend([make_rows(number)[0] for number in range(3)])
    return index.tolist(), buffer[:]["obs"].tolist()


def store_stacks(make: MakeStorage, _: Path) -> Any:
    buffer = ReplayBuffer(storage=make(), batch_size=3)
    agents = [TensorDict({"x": torch.ones(5, length, 2)}, [5]) for length in (4, 3)]
    index = buffer.extend(LazyStackedTensorDict(*agents, stack_dim=1)).tolist()
    rows = buffer.sample()
    return index, tuple(rows.batch_size), [tuple(row["x"].shape) for row in rows[0].unbind(0)], len(buffer)


def save_by_hooks(make: MakeStorage, folder: Path) -> Any:
    class NotedHook:
        shift = is_full = None

        def __call__(self, rows: Any, path: Any = None) -> Any:
            found.append((self.shift, self.is_full))
            return rows

    found: list[Any] = []
    buffer = ReplayBuffer(storage=make(), batch_size=2)
    buffer.register_save_hook(NotedHook())
    buffer.extend(make_rows(*range(5)))
    buffer.dumps(folder / "saved")
    return found


def write_more_than_fits(make: MakeStorage, _: Path) -> Any:
    buffer = ReplayBuffer(storage=make(), batch_size=2)
    index = buffer.extend(make_rows(*range(25)))
    return len(buffer), buffer.write_count, buffer[index[-3:]]["obs"].tolist(), sorted(buffer[:]["obs"].tolist())


def use_names_of_ours(make: MakeStorage, _: Path) -> Any:
    buffer = TensorDictReplayBuffer(storage=make(), batch_size=6, priority_key="priority")
    rows = make_rows(*range(4))
    rows["priority"], rows["generation"] = torch.arange(4) * 2.0, torch.arange(4)
    buffer.extend(rows, update_priority=False)
    found = buffer.sample()
    assert (found["priority"] == found["obs"] * 2).all()
    return describe(found), buffer[:]["generation"].tolist()


def keep_an_index_of_ours(make: MakeStorage, _: Path) -> Any:
    sampler = SamplerWithoutReplacement(shuffle=False)
    buffers = [ReplayBuffer(storage=make(), batch_size=4, sampler=each) for each in (None, RandomSampler(), sampler)]
    rows = make_rows(*range(4))
    rows["index"] = torch.arange(4) * 10
    found: list[Any] = []
    for buffer in buffers:
        buffer.extend(rows)
        sample = buffer.sample()
        assert (sample["index"] == sample["obs"] * 10).all()
        found.append((describe(sample), buffer[:]["index"].tolist(), buffer[1]["index"].item()))
        buffer[2] = make_rows(7)[0].set("index", torch.tensor(70))
        found.append((buffer["index"].tolist(), sorted(buffer[:].keys())))
    return found


def store_instances(make: MakeStorage, _: Path) -> Any:
    samplers = None, RandomSampler(), SamplerWithoutReplacement(), SamplerWithoutReplacement(shuffle=False)
    rows = Step(obs=torch.arange(6.0), action=torch.zeros(6, 2), batch_size=[6])  # type: ignore[call-arg]
    found = []
    for sampler in samplers:
        buffer = ReplayBuffer(storage=make(), batch_size=4, sampler=sampler, prefetch=2)
        buffer.extend(rows)
        samples = buffer.sample(), buffer[:], buffer[0], buffer.sample(5)
        assert all(isinstance(each, Step) for each in samples)
        found.append([(tuple(each.obs.shape), tuple(each.action.shape)) for each in samples])
        buffer.shutdown()
    return found


def keep_the_best(make: MakeStorage, _: Path) -> Any:
    writer = TensorDictMaxValueWriter(rank_key="obs")
    buffer = TensorDictReplayBuffer(storage=make(), writer=writer, batch_size=4)
    for first in (20, 0, 5, 30):
        buffer.extend(make_rows(*range(first, first + 4)))
    buffer.add(make_rows(50)[0])
    return sorted(buffer[:]["obs"].tolist()), len(buffer), set(buffer.sample()["obs"].tolist()) <= set(range(60))


def refuse_to_write(make: MakeStorage, _: Path) -> Any:
    storage = make()
    ReplayBuffer(storage=storage, batch_size=4).extend(make_rows(*range(4)))
    buffer = ReplayBuffer(storage=storage, writer=ImmutableDatasetWriter(), batch_size=4)
    with pytest.raises(RuntimeError, match="writing") as refused:
        buffer.extend(make_rows(0))
    return str(refused.value), len(buffer), len(buffer.sample())


PROGRAMS = [
    keep_an_index_of_ours,
    store_instances,
    keep_the_best,
    refuse_to_write,
    write_and_read,
    change_rows,
    replace_rows,
    ask_for_rows,
    sample_with_info,
    sample_tensordicts,
    use_a_sampled_batch_again,
    fail_while_empty,
    write_keys,
    restore_state,
    restore_files,
    pass_in_epochs,
    pass_in_order,
    *SLICE_PROGRAMS,
    store_tensors,
    store_lists,
    store_stacks,
    save_by_hooks,
    write_more_than_fits,
    use_names_of_ours,
]


@pytest.fixture
def make_table(client: tdserve.Client) -> Iterator[MakeStorage]:
    """Makes storages of ten rows, each in a table of its own; deletes them after the test."""
    made: list[TDServeStorage] = []

    def make() -> TDServeStorage:
        made.append(TDServeStorage(10, address=client, name=f"same-programs-{len(made)}"))
        return made[-1]

    yield make
    for storage in made:
        if storage.initialized:
            client.delete(storage.table_name)


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:A cursor of length superior", "ignore:Got conflicting", "ignore:last_cursor is None"
)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: str(program.__name__))
def test_program_when_the_storage_is_a_table_then_does_the_same(
    program: Callable[[MakeStorage, Path], Any], make_table: MakeStorage, tmp_path: Path
) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "ours").mkdir()
    theirs = program(lambda: LazyTensorStorage(10), tmp_path / "theirs")
    assert program(make_table, tmp_path / "ours") == theirs


def test_state_when_it_is_of_another_storage_then_is_taken_all_the_same(make_table: MakeStorage) -> None:
    theirs = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=2)
    theirs.extend(make_rows(*range(4)))
    ours = ReplayBuffer(storage=make_table(), batch_size=2)
    ours.load_state_dict(theirs.state_dict())
    assert ours[:]["obs"].tolist() == [0, 1, 2, 3]
    again = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=2)
    again.storage.load_state_dict(ours.state_dict()["_storage"])
    assert again[:]["obs"].tolist() == [0, 1, 2, 3]
