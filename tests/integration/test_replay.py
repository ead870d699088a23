"""Replay: a ring that writers extend and readers sample, from any number of clients, in any order."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

import tdserve
from tests.errors import raises
from tests.processes import wait_for
from tests.sameness import difference
from tests.tensordict_strategies import Inner

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
SMALL, LARGE = 3, 60_000
"""Elements of a row's observation: extends of 4 rows ride in messages, or go over the channel."""

both_sizes = pytest.mark.parametrize("size", [SMALL, LARGE])


def rows(*numbers: int, size: int = SMALL) -> TensorDict:
    """Rows whose content says which they are."""
    number = torch.tensor(numbers)
    obs = number[:, None].expand(-1, size).float() + torch.linspace(0, 0.5, size)
    return TensorDict({"obs": obs, "next": {"done": number % 2 == 0}, "number": number}, [len(numbers)])


def create(client: tdserve.Client, name: str, capacity: int, *, size: int = SMALL, **settings: Any) -> Any:
    return client.create_replay(name, rows(0, size=size)[0], capacity, **settings)


@both_sizes
def test_extend_when_rows_are_read_by_their_indices_then_they_are_equal(
    client: tdserve.Client, name: str, size: int
) -> None:
    replay = create(client, name, 10, size=size)
    index = replay.extend(rows(1, 2, 3, 4, size=size))
    assert index.dtype == torch.int64
    assert index.tolist() == [0, 1, 2, 3]
    assert difference(rows(1, 2, 3, 4, size=size), replay[index]) is None
    assert len(replay) == 4


@both_sizes
def test_extend_when_the_ring_is_full_then_the_oldest_rows_go(client: tdserve.Client, name: str, size: int) -> None:
    replay = create(client, name, 6, size=size)
    replay.extend(rows(0, 1, 2, 3, size=size))
    index = replay.extend(rows(4, 5, 6, 7, size=size))
    assert index.tolist() == [4, 5, 0, 1]
    assert len(replay) == 6
    assert sorted(replay[:]["number"].tolist()) == [2, 3, 4, 5, 6, 7]
    assert replay[index]["number"].tolist() == [4, 5, 6, 7]


@both_sizes
def test_sample_when_drawn_then_rows_are_whole_and_have_index_and_generation(
    client: tdserve.Client, name: str, size: int
) -> None:
    replay = create(client, name, 6, size=size)
    replay.extend(rows(0, 1, 2, 3, size=size))
    replay.extend(rows(4, 5, 6, 7, size=size))
    batch = replay.sample(64)
    assert batch.batch_size == (64,)
    assert set(batch["number"].tolist()) <= {2, 3, 4, 5, 6, 7}
    assert difference(rows(*batch["number"].tolist(), size=size), batch.exclude("index", "generation")) is None
    assert batch["index"].dtype == batch["generation"].dtype == torch.int64
    assert batch["index"].shape == batch["generation"].shape == (64,)
    assert torch.equal(batch["index"], batch["number"] % 6)
    # Rows 0 and 1 were written twice: their generation is even too, but higher.
    assert (batch["generation"] % 2 == 0).all()
    for index, generation in zip(batch["index"].tolist(), batch["generation"].tolist(), strict=True):
        assert generation == int(batch["generation"].min()) + (2 if index < 2 else 0)


@both_sizes
def test_sample_when_one_leaf_is_changed_in_place_then_backward_through_another_goes_on(
    client: tdserve.Client, name: str, size: int
) -> None:
    replay = create(client, name, 10, size=size)
    index = replay.extend(rows(1, 2, 3, 4, size=size))
    with replay.batches(2, prefetch=4) as batches:
        found = [replay.sample(2), replay[index], next(batches), next(batches)]
    layer = torch.nn.Linear(size, 1)
    losses = [layer(td["obs"]).sum() for td in found]
    for td in found:
        td["number"].add_(1)
    for loss in losses:
        loss.backward()


def test_sample_when_a_row_was_overwritten_then_its_generation_has_moved(client: tdserve.Client, name: str) -> None:
    replay = create(client, name, 1)
    replay.extend(rows(1))
    before = replay.sample(1)["generation"]
    replay.extend(rows(2))
    assert replay.sample(1)["generation"] > before


def test_info_when_asked_then_counts_rows_inserts_and_samples(client: tdserve.Client, name: str) -> None:
    replay = create(client, name, 6, min_size=2)
    replay.extend(rows(0, 1, 2, 3))
    replay.extend(rows(4, 5, 6, 7))
    replay.sample(5)
    replay[:]
    found = replay.info()
    expected = {"num_rows": 6, "capacity": 6, "inserts": 8, "samples": 5, "reserved_rows": 0, "min_size": 2}
    assert {key: found[key] for key in expected} == expected
    assert found["nbytes"] == 6 * (SMALL * 4 + 1 + 8)


@pytest.fixture
def half(client: tdserve.Client, name: str) -> Any:
    """A ring of 8 with five live rows, numbered from 10."""
    replay = create(client, name, 8)
    replay.extend(rows(10, 11, 12, 13, 14))
    return replay


@pytest.mark.parametrize(
    ("index", "numbers"),
    [
        (slice(None), [10, 11, 12, 13, 14]),
        (slice(1, 3), [11, 12]),
        (slice(None, None, 2), [10, 12, 14]),
        (slice(None, None, -1), [14, 13, 12, 11, 10]),
        (slice(5, None), []),
        ([4, 0, 4], [14, 10, 14]),
        (torch.tensor([1, 2]), [11, 12]),
        (torch.tensor([True, False, True, False, True]), [10, 12, 14]),
        (..., [10, 11, 12, 13, 14]),
    ],
)
def test_getitem_when_rows_are_chosen_then_brings_them_without_sampling(half: Any, index: Any, numbers: Any) -> None:
    found = half[index]
    assert difference(rows(*numbers) if numbers else rows(10)[:0], found) is None
    assert half.info()["samples"] == 0


def test_getitem_when_one_row_then_has_no_batch_dimension(half: Any) -> None:
    assert difference(rows(12)[0], half[2]) is None
    assert difference(rows(14)[0], half[-1]) is None
    assert half[torch.tensor([[0, 1], [2, 3]])]["number"].tolist() == [[10, 11], [12, 13]]


@pytest.mark.parametrize("index", [6, [0, 7], 8, -9, torch.ones(9, dtype=torch.bool), (0, 1), "obs", 1.5])
def test_getitem_when_a_row_is_not_live_or_no_row_then_typed_error(half: Any, index: Any) -> None:
    with pytest.raises((tdserve.SelectionError, tdserve.InvalidRequestError)):
        half[index]
    assert len(half[:]) == 5


def test_sample_when_too_few_rows_then_the_error_names_table_size_and_need(client: tdserve.Client, name: str) -> None:
    replay = create(client, name, 100, min_size=10)
    replay.extend(rows(1, 2, 3))
    for timeout_s in (0, 0.05):
        with pytest.raises(tdserve.DeadlineExceededError) as raised:
            replay.sample(4, timeout_s=timeout_s)
        text = str(raised.value)
        assert name in text
        assert "3" in text.replace(name, "")
        assert "10" in text.replace(name, "")
        assert raised.value.timeout_s == timeout_s


def test_sample_when_it_waits_then_the_missing_rows_wake_it(client: tdserve.Client, name: str) -> None:
    replay = create(client, name, 100, min_size=4)
    replay.extend(rows(1, 2, 3))
    later = client.run_later(lambda: replay.sample(8, timeout_s=20.0))
    wait_for(lambda: replay.info()["num_waiting"] == 1, "a sampler that waits")
    replay.extend(rows(4))
    assert len(later.result(timeout=20.0)) == 8


def test_replay_when_the_learner_comes_first_then_it_waits_for_the_table(
    server: tdserve.Server, client: tdserve.Client, name: str
) -> None:
    with server.client() as learner:
        waiting = learner.run_later(lambda: learner.replay(name, timeout_s=20.0).sample(2, timeout_s=20.0))
        create(client, name, 10).extend(rows(1, 2))
        assert len(waiting.result(timeout=20.0)) == 2
        with raises(tdserve.StoreNotFoundError, name="nowhere"):
            learner.replay("nowhere", timeout_s=0)
        with raises(tdserve.DeadlineExceededError, name="nowhere"):
            learner.replay("nowhere", timeout_s=0.05)


def test_create_replay_when_it_exists_then_exists_ok_finds_it_with_its_rows(client: tdserve.Client, name: str) -> None:
    create(client, name, 10, min_size=2).extend(rows(1, 2, 3))
    assert len(create(client, name, 10, min_size=2, exists_ok=True)) == 3
    with raises(tdserve.StoreExistsError, name=name):
        create(client, name, 10, min_size=2)
    for different in [{"capacity": 11, "min_size": 2}, {"capacity": 10, "min_size": 3}]:
        with pytest.raises(tdserve.StoreExistsError):
            create(client, name, exists_ok=True, **different)
    with pytest.raises(tdserve.StoreExistsError):
        create(client, name, 10, min_size=2, size=4, exists_ok=True)
    assert len(client.replay(name)) == 3


@both_sizes
def test_extend_when_early_then_futures_bring_the_indices_in_order(
    client: tdserve.Client, name: str, size: int
) -> None:
    replay = create(client, name, 100, size=size)
    batches = [rows(*range(4 * start, 4 * start + 4), size=size) for start in range(8)]
    under_way = deque(replay.extend(batch, return_early=True) for batch in batches)
    for batch in batches:
        index = under_way.popleft().result(timeout=20.0)
        assert torch.equal(replay[index]["number"], batch["number"])
    assert len(replay) == 32


@pytest.mark.slow
@both_sizes
def test_batches_when_iterated_then_each_is_a_sample(client: tdserve.Client, name: str, size: int) -> None:
    replay = create(client, name, 10, size=size)
    replay.extend(rows(0, 1, 2, 3, size=size))
    with replay.batches(6, prefetch=4) as batches:
        for _, batch in zip(range(20), batches, strict=False):
            assert batch.batch_size == (6,)
            assert torch.equal(batch["index"], batch["number"])
            numbers = batch["number"].tolist()
            assert difference(rows(*numbers, size=size), batch.exclude("index", "generation")) is None


@both_sizes
def test_batches_when_closed_from_another_thread_then_the_waiting_one_ends_and_the_session_goes_on(
    client: tdserve.Client, name: str, size: int
) -> None:
    replay = create(client, name, 10, size=size)
    session = client.stats()["session"]
    batches = client.replay(name).batches(4, timeout_s=60.0)
    wait_for(lambda: replay.info()["num_waiting"] > 0, "requests that wait")
    closing = threading.Timer(0.1, batches.close)
    closing.start()
    with pytest.raises(tdserve.ClosedError, match=name):
        next(batches)
    closing.join(timeout=30.0)
    assert not closing.is_alive()
    assert not [thread for thread in threading.enumerate() if thread.name == f"tdserve-batches-{name}"]
    client.replay(name).extend(rows(1, size=size))
    assert client.stats()["session"] == session


LEAVER = """
import sys, tdserve
client = tdserve.connect(sys.argv[1], transport=sys.argv[4])
replay = client.replay(sys.argv[2])
batches = replay.batches(16, prefetch=8)
print(next(batches).batch_size)
waiting = client.replay(sys.argv[3]).batches(4)
replay.extend(next(batches).exclude("index", "generation"), return_early=True)
"""


@pytest.mark.slow
@pytest.mark.once("gloo")
def test_process_when_it_ends_with_everything_open_then_it_ends_cleanly(
    server: tdserve.Server, client: tdserve.Client, name: str
) -> None:
    create(client, name, 20, size=LARGE).extend(rows(1, 2, 3, size=LARGE))
    empty = f"e{name}"[:100]
    create(client, empty, 10, size=LARGE)
    command = [sys.executable, "-c", LEAVER, server.address, name, empty, client.transport]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=60, check=False)
    assert (done.stdout, done.stderr, done.returncode) == (b"torch.Size([16])\n", b"", 0)
    client.delete(empty)


def test_batches_when_there_are_no_rows_in_time_then_raises_and_goes_on(client: tdserve.Client, name: str) -> None:
    replay = create(client, name, 10, min_size=2)
    with replay.batches(4, timeout_s=0.1) as batches:
        with pytest.raises(tdserve.DeadlineExceededError, match=name):
            next(batches)
        replay.extend(rows(1, 2))
        found: list[Any] = []
        while not found:  # an error that was on its way may still come
            try:
                found.append(next(batches))
            except tdserve.DeadlineExceededError:
                continue
        assert len(found[0]) == 4


def test_extend_when_rows_have_values_then_samples_bring_them(client: tdserve.Client, name: str) -> None:
    like = TensorDict({"x": torch.tensor(0), "prompt": "", "meta": {"v": torch.zeros(2)}}, [])
    replay = client.create_replay(name, like, 4)
    texts = ["zero", "one", "two", "three", "four", "five"]

    def batch(*numbers: int) -> TensorDict:
        meta = {"v": torch.zeros(len(numbers), 2)}
        prompt = NonTensorStack(*[texts[number] for number in numbers])
        return TensorDict({"x": torch.tensor(numbers), "prompt": prompt, "meta": meta}, [len(numbers)])

    replay.extend(batch(0, 1, 2))
    assert replay[1]["prompt"] == "one"
    replay.extend(batch(3, 4, 5))
    found = replay.sample(32)
    assert found["prompt"] == [texts[number] for number in found["x"].tolist()]
    assert replay[:]["prompt"] == ["four", "five", "two", "three"]
    same = TensorDict({"x": torch.tensor([7, 8]), "prompt": "both", "meta": {"v": torch.zeros(2, 2)}}, [2])
    assert replay[replay.extend(same)]["prompt"] == ["both", "both"]


def test_extend_when_like_is_a_tensorclass_then_rows_come_back_as_it(client: tdserve.Client, name: str) -> None:
    replay = client.create_replay(name, Inner(z=torch.zeros(3), tag="", batch_size=[]), 10)
    record = Inner(z=torch.randn(4, 3), tag="t", batch_size=[4])
    index = replay.extend(record)
    found = replay[index]
    assert type(found) is Inner
    assert torch.equal(found.z, record.z)
    sampled = replay.sample(5)
    assert torch.equal(sampled["z"], record.z[sampled["index"]])
    assert sampled["tag"] == ["t"] * 5


def test_extend_when_rows_have_batch_dimensions_then_they_are_kept(client: tdserve.Client, name: str) -> None:
    like = TensorDict({"x": torch.zeros(7, 2), "n": TensorDict({"y": torch.zeros(7, 3)}, [7, 3])}, [7], names=["time"])
    replay = client.create_replay(name, like, 10)
    batch: Any = torch.stack([like + number for number in range(4)])
    replay.extend(batch)
    assert replay.sample(3).batch_size == (3, 7)
    assert replay[1:3]["n"].batch_size == (2, 7, 3)
    assert torch.equal(replay[1:3]["x"], batch[1:3]["x"])


def test_extend_when_rows_have_batch_dimensions_and_values_then_each_element_keeps_its_own(
    client: tdserve.Client, name: str
) -> None:
    like = TensorDict({"x": torch.zeros(2), "text": NonTensorStack("", ""), "who": "all"}, [2])
    replay = client.create_replay(name, like, 3)

    def row(number: int) -> TensorDict:
        texts = NonTensorStack(f"{number}.0", f"{number}.1")
        return TensorDict({"x": torch.full((2,), float(number)), "text": texts, "who": "all"}, [2])

    replay.extend(torch.stack([row(number) for number in range(2)]))
    replay.extend(torch.stack([row(number) for number in range(2, 5)]))
    found = replay.sample(8)
    assert found["text"] == [[f"{number:.0f}.0", f"{number:.0f}.1"] for number in found["x"][:, 0].tolist()]
    assert replay[1]["text"] == ["4.0", "4.1"]


def test_extend_when_empty_then_nothing_happens(client: tdserve.Client, name: str) -> None:
    replay = create(client, name, 10)
    assert replay.extend(rows(1)[:0]).tolist() == []
    assert replay.extend(rows(1)[:0], return_early=True).result().tolist() == []
    assert replay.info()["inserts"] == 0


@pytest.mark.slow
def test_extend_when_many_clients_write_and_read_then_every_row_is_whole(
    server: tdserve.Server, client: tdserve.Client, name: str
) -> None:
    replay = create(client, name, 64)
    replay.extend(rows(0, 1))

    def write(start: int) -> None:
        with server.client() as own:
            table = own.replay(name)
            for number in range(start, start + 100, 4):
                table.extend(rows(*range(number, number + 4)))

    writers = [client.run_later(lambda: write(1000)), client.run_later(lambda: write(2000))]
    while not all(writer.done() for writer in writers):
        batch = replay.sample(16)
        assert difference(rows(*batch["number"].tolist()), batch.exclude("index", "generation")) is None
    for writer in writers:
        writer.result()
    assert replay.info()["inserts"] == 202
    assert len(replay) == 64


def test_sample_when_very_many_rows_may_be_sampled_so_often_then_each_is_and_no_more(
    client: tdserve.Client, name: str
) -> None:
    num_rows, num_drawn = 40_000, 30_000  # drawn a few at a time
    replay = client.create_replay(name, TensorDict({"x": torch.tensor(0)}, []), num_rows, max_times_sampled=2)
    replay.extend(TensorDict({"x": torch.arange(num_rows)}, [num_rows]))
    found = [replay.sample(num_drawn)["x"] for _ in range(2)]
    with pytest.raises(tdserve.DeadlineExceededError):  # there are 20,000: none of them is lost by the attempt
        replay.sample(num_drawn, timeout_s=0.5)
    found.append(replay.sample(20_000)["x"])
    assert torch.equal(torch.cat(found).sort().values, torch.arange(num_rows).repeat_interleave(2))
    wait_for(lambda: len(replay) == 0, "rows to leave that were sent")
