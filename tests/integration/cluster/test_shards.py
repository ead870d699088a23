"""A table of several servers is like a table of one: every row once, drawn with its probability."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict, lazy_stack

import tdserve
from tdserve.base.errors import (
    DeadlineExceededError,
    EndOfStreamError,
    InvalidRequestError,
    KeyNotFoundError,
    StoreExistsError,
    StoreNotFoundError,
    WrongStateError,
)
from tests import chi_square
from tests.integration.cluster.filling import SIZES, fill_unequally, rows
from tests.integration.cluster.names import next_name

pytestmark = pytest.mark.integration


def count_drawn(draw: Any, num_draws: int, num_cells: int) -> np.ndarray[Any, Any]:
    """Counts how often each number is drawn."""
    counts = np.zeros(num_cells, np.int64)
    for _ in range(num_draws):
        counts += np.bincount(draw()["number"].numpy(), minlength=num_cells)
    return counts


@pytest.mark.slow
def test_sample_when_shards_have_unequal_rows_then_every_row_as_often(
    remote_client: tdserve.ClusterClient, name: str
) -> None:
    table = remote_client.create_replay(name, rows(1)[0], 300, shards="all")
    fill_unequally(table)
    assert len(table) == sum(SIZES)
    counts = count_drawn(lambda: table.sample(64), 200, sum(SIZES))
    assert chi_square.statistic(counts) < chi_square.limit(sum(SIZES))
    positions = np.stack([table.sample(8)["number"].numpy() for _ in range(600)])
    firsts = np.bincount(positions[:, 0], minlength=sum(SIZES))  # the order tells nothing about the shard
    assert chi_square.statistic(firsts) < chi_square.limit(sum(SIZES))


@pytest.mark.slow
def test_sample_when_prioritized_then_by_priority_and_weights_as_of_one_table(
    client: tdserve.ClusterClient, name: str
) -> None:
    priorities = torch.rand(sum(SIZES)).double() + 0.1
    priorities[-SIZES[-1] :] = 0.5  # so that the weights of one shard do not show their exponent
    sampler = tdserve.Prioritized(alpha=0.7, beta=0.5)
    table = client.create_replay(name, rows(1)[0], 300, shards="all", sampler=sampler)
    fill_unequally(table, priority=priorities)
    weights = (priorities + 1e-8) ** 0.7
    probabilities = (weights / weights.sum()).numpy()
    counts = count_drawn(lambda: table.sample(64), 200, sum(SIZES))
    assert chi_square.statistic(counts, probabilities) < chi_square.limit(sum(SIZES))
    with_other_beta = client.replay(name)
    with_other_beta.set_sampler(tdserve.Prioritized(alpha=0.7, beta=0.9))
    sample = table.sample(64)  # this handle was opened with beta 0.5
    torch.testing.assert_close(
        sample["probability"].double(), torch.from_numpy(probabilities)[sample["number"]], rtol=1e-5, atol=0
    )
    expected = (weights.min() / weights[sample["number"]]) ** 0.9
    torch.testing.assert_close(sample["priority_weight"].double(), expected, rtol=1e-5, atol=0)


@pytest.mark.slow
def test_update_priority_when_rows_are_of_several_shards_then_those_alone_are_drawn(
    client: tdserve.ClusterClient, name: str
) -> None:
    table = client.create_replay(name, rows(1)[0], 300, shards="all", sampler=tdserve.Prioritized(eps=0.0))
    fill_unequally(table)
    sample = table.sample(4000)  # leaves a row out once in 10**23 times
    where = {int(number): int(row) for number, row in zip(sample["number"], sample["index"], strict=True)}
    assert table.update_priority(sample, torch.zeros(4000)) == 0
    with pytest.raises(DeadlineExceededError):
        table.sample(1, timeout_s=0.1)
    numbers = torch.tensor([where[number] for number in (3, 55, 74)])
    assert table.update_priority(numbers, torch.tensor([1.0, 2.0, 1.0]), return_early=True).result(30.0) == 0
    assert set(table.sample(200)["number"].tolist()) == {3, 55, 74}


@pytest.mark.slow
def test_sample_when_without_replacement_then_each_row_once_in_an_epoch(
    client: tdserve.ClusterClient, name: str
) -> None:
    table = client.create_replay(name, rows(1)[0], 300, shards="all", sampler=tdserve.WithoutReplacement())
    fill_unequally(table)
    for _ in range(3):
        drawn = torch.cat([table.sample(15)["number"] for _ in range(5)])
        assert sorted(drawn.tolist()) == list(range(75))
    for _ in range(3):  # 75 is no multiple of 20: some samples span two epochs, but have no row twice
        for _ in range(15):
            assert len(set(table.sample(20)["number"].tolist())) == 20


@pytest.mark.slow
def test_sample_when_of_slices_then_each_start_as_often_and_slices_stay_whole(
    client: tdserve.ClusterClient, name: str
) -> None:
    table = client.create_replay(name, rows(1)[0], 300, shards="all", sampler=tdserve.Slices(slice_len=4))
    fill_unequally(table)
    starts = np.zeros(75, np.int64)
    for _ in range(200):
        numbers = table.sample(32)["number"].reshape(8, 4)
        assert (numbers.diff(dim=1) == 1).all()
        starts += np.bincount(numbers[:, 0].numpy(), minlength=75)
    possible = np.concatenate([np.arange(0, 47), np.arange(50, 67), np.arange(70, 72)])
    assert starts.sum() == starts[possible].sum()
    assert chi_square.statistic(starts[possible]) < chi_square.limit(len(possible))
    with pytest.raises(InvalidRequestError, match="100"):
        client.create_replay(next_name(), rows(1)[0], 300, shards="all", sampler=tdserve.Slices(slice_len=101))


@pytest.mark.slow
def test_sample_when_the_number_of_slices_is_given_then_each_start_as_often_for_every_length(
    user: tdserve.ClusterClient, name: str
) -> None:
    table = user.create_replay(name, rows(1)[0], 300, shards="all", sampler=tdserve.Slices(num_slices=8))
    fill_unequally(table)
    starts = {num_rows: np.zeros(75, np.int64) for num_rows in (32, 48)}  # slices of 4 and 6, in turn
    first = np.zeros(75, np.int64)
    for _ in range(200):
        for num_rows, counts in starts.items():
            numbers = table.sample(num_rows)["number"].reshape(8, -1)
            assert (numbers.diff(dim=1) == 1).all()
            counts += np.bincount(numbers[:, 0].numpy(), minlength=75)
            first[int(numbers[0, 0])] += num_rows == 32
    for length, counts in zip((4, 6), starts.values(), strict=True):
        possible = np.concatenate([np.arange(0, 51 - length), np.arange(50, 71 - length), np.arange(70, 76 - length)])
        assert counts.sum() == counts[possible].sum() == 1600
        assert chi_square.statistic(counts[possible]) < chi_square.limit(len(possible))
    shards = np.array([first[:50].sum(), first[50:70].sum(), first[70:].sum()])  # the order shows no shard
    assert chi_square.statistic(shards, np.array([47, 17, 2]) / 66) < chi_square.limit(3)
    with pytest.raises(InvalidRequestError, match="8 slices"):
        table.sample(30)
    with pytest.raises(InvalidRequestError, match="never fit"):
        table.sample(8 * 101)
    with pytest.raises(DeadlineExceededError):
        table.sample(8 * 60, timeout_s=0.1)


@pytest.mark.slow
def test_sample_when_of_groups_then_whole_groups_of_all_shards_as_often(
    remote_client: tdserve.ClusterClient, name: str
) -> None:
    like = TensorDict({"number": torch.tensor(0), "prompt": torch.tensor(0)}, [])
    table = remote_client.create_replay(name, like, 300, shards="all", shard_by="prompt")
    number = torch.arange(120)
    written = table.extend(TensorDict({"number": number, "prompt": number % 40}, [120]))  # 40 groups of 3
    assert (table[written]["number"] == number).all()
    table.extend(
        TensorDict({"number": torch.tensor([120, 121]), "prompt": torch.tensor([100, 101])}, [2])
    )  # never whole
    shards: dict[int, set[int]] = {int(prompt): set() for prompt in range(40)}
    for prompt, row in zip((number % 40).tolist(), written.tolist(), strict=True):
        shards[prompt].add(row // table.part_capacity)
    assert all(len(each) == 1 for each in shards.values())
    assert len({next(iter(each)) for each in shards.values()}) == 3
    counts = np.zeros(40, np.int64)
    for _ in range(200):
        sample = table.sample(12, group_by="prompt", group_size=3)
        prompts = sample["prompt"].reshape(4, 3)
        assert (prompts == prompts[:, :1]).all()
        counts += np.bincount(prompts[:, 0].numpy(), minlength=40)
    assert chi_square.statistic(counts) < chi_square.limit(40)


@pytest.mark.slow
def test_sample_when_a_consumer_has_had_rows_of_one_shard_then_gets_the_others(
    client: tdserve.ClusterClient, name: str
) -> None:
    table = client.create_replay(name, rows(1)[0], 300, shards="all")
    fill_unequally(table)
    drawn: list[int] = []
    for _ in range(5):
        drawn += table.sample(15, consumer="learner")["number"].tolist()
    assert sorted(drawn) == list(range(75))
    with pytest.raises(
        DeadlineExceededError, match="too few have all leaves and were not had by consumer 'learner' and"
    ):
        table.sample(1, consumer="learner", timeout_s=0.1)
    with table.take(75, consumer="other") as taken:
        assert sorted(taken["number"].tolist()) == list(range(75))
    with pytest.raises(RuntimeError, match="work"), table.take(75, consumer="third"):
        raise RuntimeError("work")
    assert len(table.take(75, consumer="third", ack=False)) == 75


@pytest.mark.slow
def test_sample_when_min_size_is_reached_by_all_shards_together_then_no_longer_waits(
    client: tdserve.ClusterClient, name: str
) -> None:
    table = client.create_replay(name, rows(1)[0], 300, shards="all", min_size=70)
    table.extend(rows(50), writer=1)
    with pytest.raises(DeadlineExceededError, match=r"it has 50 live rows \(.*MinSize\(min_size=70\) needs more"):
        table.sample(1, timeout_s=0.1)
    waiting = client.cluster.run_later(lambda: table.sample(1, timeout_s=30.0))
    table.extend(rows(20, 50), writer=2)
    assert len(waiting.result(30.0)) == 1


@pytest.mark.parametrize("options", [{}, {"rank": 0, "world_size": 2, "step": 0}], ids=["alone", "for ranks"])
def test_sample_when_a_leaf_is_late_then_the_error_names_it_and_the_shard(
    client: tdserve.ClusterClient, name: str, options: Any
) -> None:
    table = client.create_replay(name, TensorDict({"x": torch.zeros(()), "reward": torch.zeros(())}), 64, shards="all")
    table.extend(TensorDict({"x": torch.zeros(8)}, [8]), writer=0)
    with pytest.raises(tdserve.DeadlineExceededError, match=r"\(at shard \d 'reward' is missing in 8\)"):
        table.sample(4, timeout_s=0.2, **options)


@pytest.mark.slow
def test_ranks_when_they_sample_a_step_then_disjoint_and_the_same_again(
    client: tdserve.ClusterClient, name: str
) -> None:
    table = client.create_replay(name, rows(1)[0], 300, shards="all")
    fill_unequally(table)
    for step in range(4):
        shares = [table.sample(6, rank=rank, world_size=3, step=step)["number"].tolist() for rank in range(3)]
        assert len({number for share in shares for number in share}) == 18
        assert table.sample(6, rank=1, world_size=3, step=step)["number"].tolist() == shares[1]
    with table.batches(6, rank=0, world_size=3, step=2, prefetch=2) as batches:
        assert next(batches)["number"].tolist() == table.sample(6, rank=0, world_size=3, step=2)["number"].tolist()
    table.forget_draws()
    assert table.sample(6, rank=0, world_size=3)["number"].shape == (6,)


@pytest.mark.slow
def test_queue_when_shared_then_every_row_is_taken_once_in_the_order_of_its_writer(
    remote_client: tdserve.ClusterClient, name: str
) -> None:
    queue = remote_client.create_queue(name, rows(1)[0], 300, shards="all")
    fill_unequally(queue)
    taken: list[int] = []
    with pytest.raises(RuntimeError, match="work"), queue.take(10):
        raise RuntimeError("work")
    for _ in range(6):
        with queue.take(10) as batch:
            taken += batch["number"].tolist()
    held = queue.take(5, ack=False)
    taken += held["number"].tolist()
    with pytest.raises(tdserve.InvalidRequestError, match=r"without 'index' names no rows of .* give the batch"):
        queue.ack(held.exclude("index"))
    queue.ack(held)
    with pytest.raises(WrongStateError):
        queue.ack(held)
    queue.close()
    with queue.batches(8) as batches:
        for batch in batches:
            taken += batch["number"].tolist()
    assert sorted(taken) == list(range(75))
    starts = np.cumsum((0, *SIZES))
    for begin, end in itertools.pairwise(starts):
        mine = [number for number in taken if begin <= number < end]
        assert mine == sorted(mine)
    with pytest.raises(EndOfStreamError):
        queue.take(1)


def test_writer_when_rows_are_appended_then_stored_in_one_shard(client: tdserve.ClusterClient, name: str) -> None:
    table = client.create_replay(name, rows(1)[0], 300, shards="all")
    with table.writer(batch=8) as writer:
        for number in range(20):
            writer.append(rows(1, number)[0])
    assert table[:]["number"].tolist() == list(range(20))
    assert sorted(each["num_rows"] for each in table.info()["shards"]) == [0, 0, 20]


@pytest.mark.slow
def test_values_when_rows_have_some_then_each_its_own(remote_client: tdserve.ClusterClient, name: str) -> None:
    like = TensorDict(
        {
            "number": torch.tensor(0),
            "text": "text",
            "ragged": torch.nested.nested_tensor([torch.zeros(2)], layout=torch.jagged)[0],
        },
        [],
    )
    table = remote_client.create_replay(name, like, 300, shards="all", ragged=["ragged"])
    for writer in range(1, 7):
        batch = [
            TensorDict(
                {"number": torch.tensor(n), "text": f"row {n}", "ragged": torch.full((n % 4 + 1,), float(n))}, []
            )
            for n in range(10 * writer, 10 * writer + 10)
        ]
        table.extend(lazy_stack(batch), writer=writer)
    for sample in (table.sample(40), table[:]):
        for row in sample.unbind(0):
            number = int(row["number"])
            assert row["text"] == f"row {number}"
            assert row["ragged"].tolist() == [float(number)] * (number % 4 + 1)


@pytest.mark.slow
def test_table_when_deleted_then_gone_everywhere(
    client: tdserve.ClusterClient, name: str, servers: list[tdserve.Server]
) -> None:
    table = client.create_replay(name, rows(1)[0], 300, shards="all")
    table.extend(rows(3))
    table.sample(2, rank=0, world_size=1)
    with pytest.raises(StoreExistsError):
        client.create_replay(name, rows(1)[0], 300, shards="all")
    with pytest.raises(StoreExistsError):
        client.create_replay(name, rows(1)[0], 300)
    with pytest.raises(StoreExistsError):
        client.create_replay(name, rows(1)[0], 301, shards="all", exists_ok=True)
    assert len(client.create_replay(name, rows(1)[0], 300, shards="all", exists_ok=True)) == 3
    client.delete(name)
    for server in servers:
        with server.client() as single:
            assert not single.stores(name)
    with pytest.raises(StoreNotFoundError):
        table.extend(rows(3))
    assert name not in client.stores()


@pytest.mark.slow
def test_table_when_its_parts_cannot_be_then_nothing_is_created(client: tdserve.ClusterClient, name: str) -> None:
    with pytest.raises(tdserve.TDServeError):
        client.create_replay(name, rows(1)[0], 300, shards="all", max_object_bytes=-1)
    assert name not in client
    with pytest.raises(TypeError, match="create_replay"):
        client.create_replay(name, rows(1)[0], 300, shards="all", timeout_s=1.0)
    with pytest.raises(TypeError, match="create_kv"):
        client.create_kv(name, shards="all", timeout_s=1.0)  # type: ignore[call-arg]
    assert name not in client
    client.create_replay(name, rows(1)[0], 300, shards="all")


@pytest.mark.slow
def test_keyed_store_when_shared_then_each_key_on_its_server(client: tdserve.ClusterClient, name: str) -> None:
    keyed = client.create_kv(name, rows(1)[0], shards="all")
    keys = [f"key {number}" for number in range(30)]
    versions = keyed.put(keys, rows(30))
    assert keyed.get(keys)["number"].tolist() == list(range(30))
    assert keyed.versions(keys) == versions
    assert keyed["key 7"]["number"] == 7
    assert keyed.keys() == sorted(keys)
    assert len(keyed) == 30
    assert sorted(each["num_rows"] > 0 for each in keyed.info()["shards"]) == [True, True, True]
    assert "key 3" in keyed
    assert keyed.pop(["key 3", "key 4"])["number"].tolist() == [3, 4]
    with pytest.raises(KeyNotFoundError):
        keyed["key 3"]
    assert keyed.put(["new", "key 5"], rows(2, 50), return_early=True).result(30.0)
    assert keyed.get(["new", "key 5"])["number"].tolist() == [50, 51]
    assert keyed.delete(["new", "key 5"]) == 2
    assert len(client.kv(name)) == 27


def test_batches_when_iterated_then_endless_and_closed(client: tdserve.ClusterClient, name: str) -> None:
    table = client.create_replay(name, rows(1)[0], 300, shards="all")
    fill_unequally(table)
    with table.batches(16, prefetch=3) as batches:
        for _ in range(10):
            assert len(next(batches)) == 16
    with pytest.raises(tdserve.ClosedError):
        next(batches)


def test_numbers_when_the_client_is_for_arrays_then_arrays(address: str) -> None:
    name = next_name()
    with tdserve.connect(address, numpy=True) as client:
        table = client.create_replay(name, {"number": np.int64(0)}, 300, shards="all")
        written = table.extend({"number": np.arange(5)})
        assert isinstance(written, np.ndarray)
        assert isinstance(table.sample(3)["number"], np.ndarray)
        assert table[written]["number"].tolist() == [0, 1, 2, 3, 4]
        client.delete(name)


@pytest.mark.slow
def test_extend_when_many_are_under_way_then_in_the_order_of_the_calls(
    client: tdserve.ClusterClient, name: str
) -> None:
    table = client.create_replay(name, rows(1)[0], 3000, shards="all")
    futures = [table.extend(rows(3, 3 * number), return_early=True) for number in range(100)]
    numbers = torch.cat([future.result(30.0) for future in futures])
    assert (numbers.diff() == 1).all()
    client.delete(name)
    keyed = client.create_replay(name, rows(1)[0], 3000, shards="all", shard_by="number")
    written = keyed.extend(rows(60), return_early=True).result(30.0)
    assert (keyed[written]["number"] == torch.arange(60)).all()
