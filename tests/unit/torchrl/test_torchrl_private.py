"""tdserve/torchrl/torchrl_private.py: each private name of TorchRL is still there, with the meaning that tdserve
assumes."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

pytest.importorskip("torchrl")

from torchrl.data import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import RandomSampler, SamplerWithoutReplacement, SliceSampler, prioritized
from torchrl.data.replay_buffers.storages.base import Storage
from torchrl.data.replay_buffers.writers import RoundRobinWriter

from tdserve.torchrl import torchrl_private
from tests.house import parse
from tests.private_names import all_private_names

EXAMINED = {
    "_FragmentedTrajectoryIndex",
    "_apply_pending",
    "_cache",
    "_fetch_traj",
    "_finalize_index",
    "_fragmented_index",
    "_full_rebuild",
    "_get_stop_and_length",
    "_init_collate_fn",
    "_init_sampler",
    "_init_writer",
    "_initialize_prioritized_sampler",
    "_read_records",
    "_resolve_traj_key",
    "_traj_key_auto",
    "_trajectory",
    "_validate_metadata",
}
OWN = {"_refuse"}


def test_private_names_when_listed_then_each_has_a_test_here() -> None:
    path = Path(torchrl_private.__file__)
    assert all_private_names(parse(torchrl_private.__name__, path.read_text())) - OWN == EXAMINED


class NotedStorage(Storage):  # type: ignore[misc]
    """A storage of a class that TorchRL does not know; notes what a buffer was given when it is attached."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(4)
        self.parts = parts
        self.found: list[Any] = []

    def attach(self, buffer: Any) -> None:
        super().attach(buffer)
        self.found = [*torchrl_private.get_pending_parts(buffer)]
        torchrl_private.set_pending_parts(buffer, *self.parts)

    def __len__(self) -> int:
        return 3


def test_init_sampler_and_init_writer_when_replaced_in_attach_then_the_buffer_uses_them() -> None:
    given, ours = (RandomSampler(), RoundRobinWriter()), (RandomSampler(), RoundRobinWriter())
    storage = NotedStorage(*ours)
    buffer = ReplayBuffer(storage=storage, sampler=given[0], writer=given[1])
    assert [id(part) for part in storage.found] == [id(part) for part in given]
    assert (buffer.sampler, buffer.writer) == ours


def test_init_sampler_and_init_writer_when_none_are_given_then_none_or_a_function() -> None:
    storage = NotedStorage(None, None)
    ReplayBuffer(storage=storage)
    assert storage.found == [None, None]
    storage = NotedStorage(None, None)
    TensorDictReplayBuffer(storage=storage)
    assert storage.found[0] is None
    assert callable(storage.found[1])


def test_init_collate_fn_when_none_is_given_then_rows_stay_as_they_are() -> None:
    storage = NotedStorage(None, None)
    storage.get = list
    storage.device = None
    assert ReplayBuffer(storage=storage, batch_size=5).sample() == pytest.approx([0, 1, 2, 1, 1], abs=2)
    with_own = ReplayBuffer(storage=storage, batch_size=5, collate_fn=len)
    assert with_own.sample() == 5


def test_initialize_prioritized_sampler_when_a_buffer_is_made_then_gives_no_priorities() -> None:
    torchrl_private.allow_missing_trees()
    updates: list[Any] = []

    class NotingSampler(prioritized.PrioritizedSampler):  # type: ignore[misc]
        def update_priority(self, *changes: Any, **_: Any) -> None:
            updates.append(changes)

    sampler = NotingSampler(4, 1.0, 1.0)
    buffer = ReplayBuffer(storage=NotedStorage(sampler, None))
    assert buffer.sampler is sampler
    assert updates == []


def test_trees_when_missing_then_a_sampler_can_be_made_but_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SumSegmentTreeFp32", "MinSegmentTreeFp32", "SumSegmentTreeFp64", "MinSegmentTreeFp64"):
        assert hasattr(prioritized, name)
        monkeypatch.setattr(prioritized, name, None)
    with pytest.raises(RuntimeError, match="SumSegmentTreeFp32"):
        prioritized.PrioritizedSampler(4, 1.0, 1.0)
    torchrl_private.allow_missing_trees()
    sampler = prioritized.PrioritizedSampler(4, 1.0, 1.0)
    with pytest.raises(ImportError, match="segment trees"):
        sampler.update_priority(0, 1.0)
    with pytest.raises(ImportError, match="segment trees"):
        sampler.sample([1], 1)


def test_trees_when_they_are_there_then_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prioritized, "SumSegmentTreeFp32", int)
    torchrl_private.allow_missing_trees()
    assert prioritized.SumSegmentTreeFp32 is int


def test_state_when_shared_then_is_one_in_both_directions() -> None:
    class Other(SamplerWithoutReplacement):  # type: ignore[misc]
        """A class of the same attributes."""

    sampler = SamplerWithoutReplacement(drop_last=True)
    other = torchrl_private.share_state(sampler, Other)
    sampler.shuffle = False
    other.len_storage = 7
    assert (other.drop_last, other.shuffle, sampler.len_storage) == (True, False, 7)


def test_functions_when_put_into_a_buffer_then_are_pickled_by_name() -> None:
    assert pickle.loads(pickle.dumps(torchrl_private.return_unchanged))(3) == 3
    assert pickle.loads(pickle.dumps(torchrl_private.do_nothing))() is None


def test_setitem_when_the_storage_is_another_then_is_as_torchrl_has_it() -> None:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(4), batch_size=2)
    buffer.extend(TensorDict({"a": torch.zeros(4), "n": {"b": torch.zeros(4)}}, [4]))
    buffer["a"] = torch.arange(4.0)
    buffer["n", "b"] = torch.ones(4)
    buffer[1] = TensorDict({"a": torch.tensor(7.0), "n": {"b": torch.tensor(8.0)}, "index": torch.tensor(1)}, [])
    assert buffer[:]["a"].tolist() == [0.0, 7.0, 2.0, 3.0]
    assert buffer[:]["n", "b"].tolist() == [1.0, 8.0, 1.0, 1.0]


class KeyedRows(NotedStorage):
    """Rows of three episodes, of two each, that are no tensor storage."""

    def __init__(self) -> None:
        super().__init__(None, None)
        ends = torch.arange(6) % 2 == 1
        self.num_draws = self.num_drawn_reads = 0
        self.held: Any = None
        self.rows = TensorDict({"episode": torch.arange(6) // 2, "next": {"done": ends}}, [6])

    def __getitem__(self, index: Any) -> Any:
        return self.rows[index]

    def __len__(self) -> int:
        return 6

    def get(self, index: Any) -> Any:
        return self.rows[index]

    def has_key(self, key: Any) -> bool:
        return key in self.rows.keys(True)

    def narrow(self, keys: list[Any], ends: Sequence[Any] = ()) -> KeyedRows:
        """Returns the same rows with some keys, and notes these."""
        narrow = copy(self)
        self.found.append([key for key in (*keys, *ends) if key is not None and self.has_key(key)])
        narrow.rows = self.rows.select(*self.found[-1])
        narrow.division = torch.arange(len(self))
        return narrow

    def keep_live(self, slices: Any) -> Any:
        return slices

    def note_division(self, division: Any) -> None:
        assert len(division) == len(self)

    def draw_whole(self, draw: Any) -> Any:
        self.num_draws += 1
        return draw()

    def read_drawn(self, division: Any) -> KeyedRows:
        """Returns these rows, and notes that they are read once."""
        self.num_drawn_reads += 1
        return self

    def hold_for(self, index: Any) -> None:
        self.held = index


def make_divided() -> Any:
    """A storage of a class of its own: others are left as they are."""

    class Divided(KeyedRows):
        """Read by some of its keys."""

    torchrl_private.divide_by_columns(Divided)
    return Divided()


@pytest.mark.parametrize("key", ["episode", "other"])
def test_get_stop_and_length_when_rows_lack_the_key_then_slices_are_those_between_ends(key: str) -> None:
    (index,), _ = SliceSampler(num_slices=9, traj_key=key).sample(make_divided(), 18)
    assert (index.view(9, 2)[:, 0] % 2 == 0).all()
    assert (index.view(9, 2).diff() == 1).all()


def test_get_stop_and_length_when_no_key_is_given_then_it_is_found_and_only_keys_of_slices_are_read() -> None:
    storage = make_divided()
    sampler = SliceSampler(num_slices=9)
    for _ in range(2):
        sampler.sample(storage, 18)
    assert sampler.traj_key == "episode"
    assert storage.num_draws == storage.num_drawn_reads == 2
    assert storage.found == [["episode", ("next", "done")]] * 2


def test_read_records_when_slices_are_fragmented_then_only_their_keys_are_read() -> None:
    storage = make_divided()
    storage.rows["step"] = torch.tensor([0, 1, 0, 1, 1, 0])
    sampler = SliceSampler(num_slices=9, traj_key="episode", step_key="step", fragmented=True)
    ((index,), _) = found = sampler.sample(storage, 18)
    assert storage.held is found[0]
    assert set(map(tuple, index.view(9, 2).tolist())) <= {(0, 1), (2, 3), (5, 4)}
    assert storage.found == [["episode", "step"]]


def test_get_stop_and_length_when_the_storage_is_another_then_is_as_torchrl_has_it() -> None:
    storage = LazyTensorStorage(6)
    storage.set(range(6), KeyedRows().rows)
    (index,), _ = SliceSampler(num_slices=3, traj_key="other").sample(storage, 6)
    assert (index.view(3, 2).diff() == 1).all()
    with pytest.raises(RuntimeError, match="Could not get a tensordict"):
        SliceSampler(num_slices=3, traj_key="other").sample(KeyedRows(), 6)
