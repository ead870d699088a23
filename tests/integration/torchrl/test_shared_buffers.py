"""One table under several buffers: other processes, rows that lack keys, options of the table, and what is refused."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict, lazy_stack

import tdserve

pytest.importorskip("torchrl")

from torchrl.data import ReplayBuffer, TensorDictPrioritizedReplayBuffer
from torchrl.data.replay_buffers.samplers import SliceSampler, SliceSamplerWithoutReplacement

from tdserve.torchrl import TDServeStorage
from tests.errors import raises

pytestmark = pytest.mark.integration


def make_rows(*numbers: int, **more: Any) -> TensorDict:
    number = torch.tensor(numbers, dtype=torch.float32)
    return TensorDict({"obs": number, **more}, [len(numbers)])


def write_from_afar(buffer: Any, numbers: list[int]) -> None:
    """The function of another process, which gets a pickled buffer."""
    buffer.extend(make_rows(*numbers))
    assert len(buffer) == len(numbers) + 2
    assert set(buffer.sample()["obs"].tolist()) <= {0.0, 1.0, *numbers}


@pytest.mark.slow
def test_buffer_when_sent_to_a_spawned_process_then_both_use_the_table(client: tdserve.Client, name: str) -> None:
    storage = TDServeStorage(10, address=client, name=name)
    buffer = TensorDictPrioritizedReplayBuffer(alpha=0.7, beta=0.5, storage=storage, batch_size=4)
    buffer.extend(make_rows(0, 1))
    child = multiprocessing.get_context("spawn").Process(target=write_from_afar, args=(buffer, [5, 6, 7]))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert (len(buffer), buffer.write_count) == (5, 5)
    assert buffer[:]["obs"].tolist() == [0.0, 1.0, 5.0, 6.0, 7.0]
    assert buffer.extend(make_rows(8)).tolist() == [5]


@pytest.mark.slow
def test_storage_when_pickled_before_it_has_rows_then_finds_the_table_that_another_creates(
    client: tdserve.Client, name: str
) -> None:
    first = TDServeStorage(10, address=client, name=name)
    second: Any = pickle.loads(pickle.dumps(first))
    assert (len(first), first.initialized, second.initialized) == (0, False, False)
    reader = ReplayBuffer(storage=second, batch_size=2)
    ReplayBuffer(storage=first, batch_size=2).extend(make_rows(3, 3))
    assert reader.sample()["obs"].tolist() == [3.0, 3.0]


def test_rows_when_they_lack_keys_then_have_zeros_or_wait_for_them(client: tdserve.Client, name: str) -> None:
    like = make_rows(0, action=torch.zeros(1, 2), next={"obs": torch.zeros(1)})[0]
    buffer = ReplayBuffer(storage=TDServeStorage(10, address=client, name=name, like=like), batch_size=2)
    assert buffer.initialized
    buffer.extend(make_rows(4, 5))
    rows = buffer[:]
    assert (rows["action"].tolist(), rows["next", "obs"].tolist()) == ([[0.0, 0.0]] * 2, [0.0, 0.0])
    late = ReplayBuffer(storage=TDServeStorage(10, address=client, name=name, missing="late"), batch_size=64)
    index = late.extend(make_rows(6))
    assert set(late.sample()["obs"].tolist()) == {4.0, 5.0}
    client[name].set_at_("action", torch.ones(1, 2), index)
    client[name].set_at_(("next", "obs"), torch.ones(1), index)
    assert set(late.sample()["obs"].tolist()) == {4.0, 5.0, 6.0}


def test_slices_when_several_writers_take_turns_then_no_slice_mixes_them(client: tdserve.Client, name: str) -> None:
    def make() -> Any:
        storage = TDServeStorage(100, address=client, name=name)
        return ReplayBuffer(storage=storage, sampler=SliceSampler(slice_len=2, traj_key="episode"), batch_size=40)

    first = make()
    first.extend(make_rows(0, 1, episode=torch.tensor([0, 0])))
    second: Any = pickle.loads(pickle.dumps(make()))
    for step in range(2, 12, 2):
        second.extend(make_rows(100 + step, 101 + step, episode=torch.tensor([1, 1])))
        first.extend(make_rows(step, step + 1, episode=torch.tensor([0, 0])))
    slices = first.sample()["obs"].view(20, 2)
    assert (slices.diff() == 1).all()


@pytest.mark.parametrize("kind", [SliceSampler, SliceSamplerWithoutReplacement])
def test_slices_when_drawn_in_this_process_then_only_the_keys_that_divide_the_rows_are_read(
    server: tdserve.Server, name: str, kind: type[Any]
) -> None:
    with tdserve.connect(server.address, transport="gloo") as client:
        storage = TDServeStorage(2000, address=client, name=name)
        sampler = kind(slice_len=4, traj_key="episode", strict_length=False)
        buffer = ReplayBuffer(storage=storage, sampler=sampler, batch_size=8)
        number = torch.arange(2000)
        rows = make_rows(*range(2000), wide=number[:, None].expand(-1, 500).float(), episode=number // 10)
        buffer.extend(rows)
        buffer.sample()
        before = client.stats()["transports"]["gloo"]["bytes_out"]
        sample = buffer.sample()
        read = client.stats()["transports"]["gloo"]["bytes_out"] - before
    assert (sample["obs"].view(2, 4).diff() == 1).all()
    assert read < rows["wide"].nbytes / 10


LOCAL_SLICES = {
    "short": lambda: SliceSampler(slice_len=4, traj_key="episode", strict_length=False),
    "by ends": lambda: SliceSampler(slice_len=4, end_key="done", strict_length=False),
    "fragmented": lambda: SliceSampler(slice_len=3, traj_key="episode", step_key="step", fragmented=True),
    "each once": lambda: SliceSamplerWithoutReplacement(slice_len=3, traj_key="episode", strict_length=False),
}


def make_numbered(begin: int, end: int) -> TensorDict:
    """Rows of episodes of seven."""
    number = torch.arange(begin, end)
    return make_rows(*range(begin, end), episode=number // 7, step=number % 7, done=(number % 7 == 6)[:, None])


def check_slice(rows: Any) -> set[int]:
    """Checks that rows follow each other in one episode; returns their numbers."""
    assert (rows["obs"].diff() == 1).all()
    assert len(rows["episode"].unique()) == 1
    return {int(number) for number in rows["obs"]}


def test_storage_when_asked_which_of_many_rows_it_contains_then_asks_the_server_as_often_as_for_one(
    client: tdserve.Client, name: str
) -> None:
    storage = TDServeStorage(60, address=client, name=name)
    storage.extend(make_rows(*range(50)))
    asked, before = torch.arange(-60, 60), client.requests.newest
    assert torch.equal(storage.contains(asked), (asked >= -50) & (asked < 50))
    assert client.requests.newest - before <= 2


def test_storage_when_rows_have_left_then_contains_the_others(client: tdserve.Client, name: str) -> None:
    storage = TDServeStorage(10, address=client, name=name)
    storage.extend(make_rows(*range(8)))
    client.replay(name).delete([1, 4])
    live = [[True, False, True], [False, True, False]]
    assert storage.contains(torch.tensor([[0, 1, 2], [4, 7, 8]])).tolist() == live
    assert [number in storage for number in (0, 4, -1, -2, -7, 10)] == [True, False, True, False, False, False]


@pytest.mark.slow
@pytest.mark.parametrize("kind", LOCAL_SLICES)
@pytest.mark.parametrize("num_rows", [28, 58])
def test_slices_when_rows_have_left_then_none_goes_over_the_gap(
    client: tdserve.Client, name: str, kind: str, num_rows: int
) -> None:
    storage, size = TDServeStorage(42, address=client, name=name), 3 if kind in ("fragmented", "each once") else 4
    buffer = ReplayBuffer(storage=storage, sampler=LOCAL_SLICES[kind](), batch_size=size)
    for begin in range(0, num_rows, 10):
        buffer.extend(make_numbered(begin, min(begin + 10, num_rows)))
    first = max(num_rows - 42, 0)
    gone = [first + 10, first + 11, first + 20]
    client.replay(name).delete([number % 42 for number in gone])
    seen = set[int]()
    for _ in range(150):
        seen |= check_slice(buffer.sample())
    assert seen <= set(range(first, num_rows)) - set(gone)
    assert len(seen) > (num_rows - first) / 2


@pytest.mark.parametrize("kind", LOCAL_SLICES)
def test_slices_when_rows_are_overwritten_before_they_are_read_then_drawn_again(
    client: tdserve.Client, name: str, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    storage, size = TDServeStorage(42, address=client, name=name), 3 if kind in ("fragmented", "each once") else 4
    buffer = ReplayBuffer(storage=storage, sampler=LOCAL_SLICES[kind](), batch_size=size)
    buffer.extend(make_numbered(0, 42))
    writer, begins, read_drawn = client.replay(name), [42, 84], storage.read_drawn

    def overwrite_all(division: Any) -> Any:
        drawn = read_drawn(division)
        if begins:
            begin = begins.pop(0)
            writer.extend(make_numbered(begin, begin + 42))
        return drawn

    monkeypatch.setattr(storage, "read_drawn", overwrite_all)
    assert check_slice(buffer.sample()) <= set(range(84, 126))
    assert begins == []


def test_limiter_when_chosen_then_samples_wait_and_time_out(client: tdserve.Client, name: str) -> None:
    storage = TDServeStorage(10, address=client, name=name, like=make_rows(0)[0], min_size=3)
    buffer = ReplayBuffer(storage=storage, batch_size=2, prefetch=1)
    buffer.extend(make_rows(0, 1))
    client.timeout_s, before = 0.2, client.timeout_s
    with pytest.raises(tdserve.DeadlineExceededError, match=name):
        buffer.sample()
    client.timeout_s = before
    buffer.extend(make_rows(2))
    assert len(buffer.sample()) == 2
    buffer.shutdown()


def test_emptied_table_when_its_numbers_begin_elsewhere_then_local_samplers_read_live_rows(
    client: tdserve.Client, name: str
) -> None:
    client.create_replay(name, make_rows(0)[0], 10, sampler=tdserve.Prioritized())
    buffer = ReplayBuffer(storage=TDServeStorage(10, address=client, name=name), batch_size=30)
    for _ in range(3):
        buffer.extend(make_rows(0, 1, 2, 3))
        buffer.empty()
    index = buffer.extend(make_rows(7, 8))
    assert buffer[index]["obs"].tolist() == [7.0, 8.0]
    assert set(buffer.sample()["obs"].tolist()) == {7.0, 8.0}


def test_extend_when_steps_of_several_environments_are_stacked_then_a_row_each(
    client: tdserve.Client, name: str
) -> None:
    buffer = ReplayBuffer(storage=TDServeStorage(20, address=client, name=name), batch_size=4)
    for time in range(2):  # as from a collector that steps a vector of environments
        buffer.extend(lazy_stack([make_rows(10 * time + step, 10 * time + step) for step in range(5)], dim=1))
    assert len(buffer) == 4
    assert buffer[:]["obs"].tolist() == [[0.0, 1.0, 2.0, 3.0, 4.0]] * 2 + [[10.0, 11.0, 12.0, 13.0, 14.0]] * 2


def test_storage_when_misused_then_the_error_names_the_argument(
    client: tdserve.Client, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TDSERVE_ADDRESS", raising=False)
    with pytest.raises(tdserve.InvalidRequestError, match="TDSERVE_ADDRESS"):
        TDServeStorage(10, name=name)
    with raises(tdserve.InvalidRequestError, argument="min_sise"):
        TDServeStorage(10, address=client, name=name, min_sise=4)
    with raises(tdserve.InvalidRequestError, argument="missing"):
        TDServeStorage(10, address=client, name=name, missing="ones")
    storage = TDServeStorage(10, address=client, name=name)
    buffer = ReplayBuffer(storage=storage, batch_size=2)
    with pytest.raises(tdserve.WrongStateError, match=name):
        buffer[0]
    with pytest.raises(tdserve.InvalidRequestError, match="TensorDict"):
        buffer.extend({"obs": torch.zeros(2)})
    buffer.extend(make_rows(0))
    with pytest.raises(tdserve.InvalidRequestError, match=r"max_size.*20.*10"):
        TDServeStorage(20, address=client, name=name)
    with pytest.raises(tdserve.SelectionError):
        buffer[5]


def test_address_when_the_environment_names_it_then_is_found(
    server: tdserve.Server, client: tdserve.Client, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TDSERVE_ADDRESS", server.address)
    buffer = ReplayBuffer(storage=lambda: TDServeStorage(10, name=name), batch_size=2, delayed_init=True)
    buffer.extend(make_rows(4))
    assert client[name][0]["obs"] == 4.0


def test_key_when_a_buffer_sets_it_then_every_process_reads_it(client: tdserve.Client, name: str) -> None:
    buffer = ReplayBuffer(
        storage=lambda: TDServeStorage(10, address=client, name=name), batch_size=2, delayed_init=True
    )
    buffer.extend(make_rows(1, 2, 3))
    buffer["obs"] = torch.tensor([4.0, 5.0, 6.0])
    assert client[name][:]["obs"].tolist() == [4.0, 5.0, 6.0]
    with pytest.raises(tdserve.InvalidRequestError, match="one dimension"):
        buffer[0, 1] = make_rows(7)
    with raises(tdserve.RequestError, key="other"):
        buffer["other"] = torch.zeros(3)
    assert client[name][:]["obs"].tolist() == [4.0, 5.0, 6.0]


def test_state_when_rows_have_several_dtypes_then_torch_saves_and_loads_it(
    client: tdserve.Client, name: str, tmp_path: Path
) -> None:
    buffer = ReplayBuffer(storage=TDServeStorage(10, address=client, name=name), batch_size=2)
    buffer.extend(make_rows(4, 5, action=torch.tensor([1, 2]), done=torch.tensor([True, False])))
    torch.save(buffer.state_dict(), tmp_path / "buffer.pt")
    buffer.extend(make_rows(6, action=torch.tensor([3]), done=torch.tensor([False])))
    buffer.load_state_dict(torch.load(tmp_path / "buffer.pt"))
    rows = buffer[:]
    assert (rows["obs"].tolist(), rows["action"].tolist(), rows["done"].tolist()) == ([4, 5], [1, 2], [True, False])


@pytest.mark.parametrize("leaves", [lambda table: table.delete([7]), lambda table: table.clear()])
def test_state_when_rows_have_left_a_full_ring_then_it_is_in_the_order_of_commits(
    client: tdserve.Client, name: str, leaves: Callable[[tdserve.ReplayHandle], object]
) -> None:
    buffer = ReplayBuffer(storage=TDServeStorage(10, address=client, name=name), batch_size=2)
    buffer.extend(make_rows(*range(10)))
    buffer.extend(make_rows(*range(10, 14)))
    leaves(buffer.storage.table)
    for first in range(20, 44, 3):
        buffer.extend(make_rows(*range(first, first + 3)))
        saved = buffer.state_dict()["_storage"]["_storage"]["obs"].tolist()
        assert saved == sorted(saved)
    assert saved[-9:] == [*range(35, 44)]
