"""Tables by their rules, over real sockets: samplers, removers, priorities, deletions, limiters, slices, bad input."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import tdserve
from tests import chi_square
from tests.errors import raises
from tests.integration.fleet import Fleet
from tests.processes import wait_for
from tests.sameness import difference

pytestmark = pytest.mark.integration


def rows(*numbers: int) -> TensorDict:
    """Rows whose content says which they are."""
    number = torch.tensor(numbers, dtype=torch.int64)
    return TensorDict({"number": number, "obs": number[:, None].expand(-1, 3).float()}, [len(numbers)])


def create(client: tdserve.Client, name: str, capacity: int, *, num_rows: int = 0, **settings: Any) -> Any:
    """A table that holds the first ``num_rows`` numbers."""
    replay = client.create_replay(name, rows(0)[0], capacity, **settings)
    replay.extend(rows(*range(num_rows)))
    return replay


def numbers(td: Any) -> list[int]:
    """The number of each row; fails when a row is not whole."""
    assert (td["obs"] == td["number"][:, None].float()).all()
    found: list[int] = td["number"].tolist()
    return found


# ---------------------------------------------------------------- samplers and removers


def test_fifo_when_sampled_then_the_oldest_in_order_also_after_the_ring_went_round(
    client: tdserve.Client, name: str
) -> None:
    replay = create(client, name, 6, num_rows=6, sampler=tdserve.Fifo())
    replay.extend(rows(6, 7))
    assert numbers(replay.sample(4)) == [2, 3, 4, 5]
    assert numbers(replay.sample(6)) == [2, 3, 4, 5, 6, 7]
    replay.delete([3])
    assert numbers(replay.sample(3)) == [2, 4, 5]


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_read_when_rows_in_the_middle_are_gone_or_it_went_round_then_the_others_in_order(
    client: tdserve.Client, name: str
) -> None:
    num_rows, num_gone = 300_000, 1000
    like = TensorDict({"x": torch.zeros((), dtype=torch.int64)}, [])
    table = client.create_replay(name, like=like, capacity=num_rows)
    for first in (0, 200_000):  # the second goes round the end
        index = table.extend(TensorDict({"x": torch.arange(first, first + 200_000)}, [200_000]))
        assert (table[index]["x"] == torch.arange(first, first + 200_000)).all()
    table.delete(torch.arange(150_000, 150_000 + num_gone))
    numbers = table[:]["x"]
    assert len(numbers) == num_rows - num_gone
    assert numbers.unique().tolist() == [*range(100_000, 150_000), *range(150_000 + num_gone, 400_000)]


def test_lifo_when_sampled_then_the_newest_first(client: tdserve.Client, name: str) -> None:
    replay = create(client, name, 6, num_rows=6, sampler=tdserve.Lifo())
    replay.extend(rows(6, 7))
    assert numbers(replay.sample(4)) == [7, 6, 5, 4]
    with pytest.raises(tdserve.InvalidRequestError):
        replay.sample(7)


def test_fifo_when_batches_are_iterated_then_each_row_as_often_as_it_may(client: tdserve.Client, name: str) -> None:
    replay = create(client, name, 12, num_rows=12, sampler=tdserve.Fifo(), max_times_sampled=1)
    with replay.batches(3, prefetch=2) as batches:
        assert [numbers(next(batches)) for _ in range(4)] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert len(replay) == 0


def test_max_times_sampled_when_reached_then_the_row_is_gone_and_the_count_comes_along(
    client: tdserve.Client, name: str
) -> None:
    replay = create(client, name, 4, num_rows=4, max_times_sampled=3)
    seen: Counter[int] = Counter()
    for _ in range(4):
        batch = replay.sample(3)
        for number, times in zip(numbers(batch), batch["times_sampled"].tolist(), strict=True):
            assert seen[number] < times <= 3
        seen.update(numbers(batch))
    assert seen == {0: 3, 1: 3, 2: 3, 3: 3}
    assert len(replay) == 0
    with pytest.raises(tdserve.DeadlineExceededError, match=name):
        replay.sample(1, timeout_s=0)


def test_lowest_priority_when_the_table_is_full_then_the_least_important_rows_go(
    client: tdserve.Client, name: str
) -> None:
    replay = client.create_replay(name, rows(0)[0], 6, remover=tdserve.LowestPriority())
    replay.extend(rows(0, 1, 2, 3, 4, 5), priority=[5.0, 0.0, 4.0, 1.0, 3.0, 2.0])
    replay.extend(rows(6, 7), priority=10.0)
    assert sorted(numbers(replay[:])) == [0, 2, 4, 5, 6, 7]
    batch = replay.sample(32)
    priorities = dict(zip(numbers(batch), batch["priority"].tolist(), strict=True))
    replay.update_priority(batch, torch.where(batch["number"] == 6, 0.5, batch["priority"]))
    assert priorities.get(6, 10.0) == 10.0
    replay.update_priority(replay_index(replay, 6), 0.5)
    replay.extend(rows(8), priority=1.0)
    assert sorted(numbers(replay[:])) == [0, 2, 4, 5, 7, 8]


def replay_index(replay: Any, number: int) -> list[int]:
    """The row number of a row."""
    batch = replay.sample(len(replay), timeout_s=20.0)
    while number not in batch["number"].tolist():
        batch = replay.sample(len(replay), timeout_s=20.0)
    return [int(batch["index"][batch["number"] == number][0])]


@pytest.mark.slow
def test_without_replacement_when_four_clients_share_it_then_each_row_once_per_epoch(
    client: tdserve.Client, name: str
) -> None:
    num_rows, num_epochs = 96, 4
    create(client, name, num_rows, num_rows=num_rows, sampler=tdserve.WithoutReplacement())
    task = ("epoch", {"name": name, "num_rows": 8, "num_samples": num_epochs * num_rows // 8 // 4})
    with Fleet(client, task, task, task, task) as fleet:
        fleet.wait_all("over")
        drawn = [fleet.numbers(child, "drew") for child in range(4)]
    assert Counter(number for each in drawn for number in each) == dict.fromkeys(range(num_rows), num_epochs)


def test_without_replacement_when_one_samples_then_every_epoch_in_another_order(
    client: tdserve.Client, name: str
) -> None:
    replay = create(client, name, 40, num_rows=30, sampler=tdserve.WithoutReplacement())
    epochs = [numbers(replay.sample(10)) + numbers(replay.sample(20)) for _ in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [[*range(30)]] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3
    with pytest.raises(tdserve.InvalidRequestError, match="31"):
        replay.sample(31)


# ---------------------------------------------------------------- priorities, deletions


def test_priority_when_none_is_given_then_the_highest_so_far(client: tdserve.Client, name: str) -> None:
    replay = create(client, name, 8, sampler=tdserve.Prioritized(alpha=1.0))
    replay.extend(rows(0, 1), priority=torch.tensor([0.25, 3.0]))
    replay.extend(rows(2))
    replay.update_priority([0], 9.0)
    replay.extend(rows(3))
    batch = replay.sample(400)
    assert dict(zip(numbers(batch), batch["priority"].tolist(), strict=True)) == {0: 9.0, 1: 3.0, 2: 3.0, 3: 9.0}
    assert batch["priority"].dtype == batch["probability"].dtype == batch["priority_weight"].dtype == torch.float32


def test_update_priority_when_rows_were_overwritten_meanwhile_then_skips_and_counts_them(
    client: tdserve.Client, name: str
) -> None:
    replay = create(client, name, 4, num_rows=4, sampler=tdserve.Prioritized(alpha=1.0, eps=0.0))
    batch = replay.sample(64)
    assert set(numbers(batch)) == {0, 1, 2, 3}
    replay.extend(rows(4))
    replay.delete([1])
    num_gone = sum(number in (0, 1) for number in numbers(batch))
    assert replay.update_priority(batch, torch.zeros(64)) == num_gone
    assert set(numbers(replay.sample(64))) == {4}, "its priority is its own; the others have none left"
    assert replay.update_priority([2, 3, 2], [5.0, 0.0, 1.0]) == 0
    after = replay.sample(64)
    assert set(zip(numbers(after), after["priority"].tolist(), strict=True)) == {(4, 1.0), (2, 1.0)}
    assert replay.update_priority([2], 0.0, generation=batch["generation"][:1] + 2) == 1


def test_delete_when_of_sampled_rows_then_gone_everywhere(client: tdserve.Client, name: str) -> None:
    replay = create(client, name, 8, num_rows=8)
    batch = replay.sample(3)
    gone = set(numbers(batch))
    assert replay.delete(batch) == len(gone)
    assert set(numbers(replay[:])) == set(range(8)) - gone
    assert not gone & set(numbers(replay.sample(100)))
    with pytest.raises(tdserve.SelectionError):
        replay[batch["index"]]
    with pytest.raises(tdserve.SelectionError):
        replay.delete(batch["index"])
    assert replay.delete(batch) == 0, "a batch stands for its rows, which are gone"
    index = replay.extend(rows(*range(8, 8 + len(gone))))
    assert sorted(index.tolist()) == sorted(set(batch["index"].tolist())), "their places are the next ones"


def test_clear_when_done_then_the_limiter_begins_anew(client: tdserve.Client, name: str) -> None:
    limiter = tdserve.SampleToInsertRatio(1.0, min_size=4, error_buffer=4.0)
    replay = create(client, name, 16, num_rows=8, limiter=limiter)
    replay.sample(4)
    assert replay.clear() == 8
    with pytest.raises(tdserve.DeadlineExceededError, match=r"size 0 of 16.*inserts 0, samples 0"):
        replay.sample(1, timeout_s=0)
    replay.extend(rows(*range(10, 18)))
    assert set(numbers(replay.sample(4))) <= set(range(10, 18))


# ---------------------------------------------------------------- limiters


@pytest.mark.parametrize(
    ("limiter", "call", "texts"),
    [
        (
            tdserve.MinSize(10),
            "sample",
            ["size 4 of 16", "inserts 4", "samples 0", "MinSize(min_size=10)", "size of 10"],
        ),
        (tdserve.Queue(5), "sample", ["size 4 of 16", "Queue(max_size=5)", "size of 5"]),
        (tdserve.Queue(5), "extend", ["size 4 of 16", "reserved 0", "Queue(max_size=5)", "of at most 0"]),
        (
            tdserve.SampleToInsertRatio(2.0, min_size=2, error_buffer=5.0),
            "sample",
            ["size 4 of 16", "inserts 4", "samples 0", "ratio=2.0", "now 8", "at least -1"],
        ),
        (
            tdserve.SampleToInsertRatio(2.0, min_size=2, error_buffer=5.0),
            "extend",
            ["size 4 of 16", "inserts 4", "samples 0", "ratio=2.0", "now 8", "at most 9"],
        ),
    ],
)
def test_limiter_when_a_call_waited_in_vain_then_the_error_names_the_limit(
    client: tdserve.Client, name: str, limiter: Any, call: str, texts: list[str]
) -> None:
    replay = create(client, name, 16, num_rows=4, limiter=limiter)
    for timeout_s in (0, 0.1):
        num_rows = 5 if call == "extend" or isinstance(limiter, tdserve.Queue) else 10
        given: Any = rows(*range(num_rows)) if call == "extend" else num_rows
        with pytest.raises(tdserve.DeadlineExceededError) as raised:
            getattr(replay, call)(given, timeout_s=timeout_s)
        message = str(raised.value)
        assert repr(name) in message
        assert [text for text in texts if text not in message] == [], message
        assert raised.value.timeout_s == timeout_s
    assert replay.info()["inserts"] == 4
    assert replay.info()["reserved_rows"] == 0


def test_numbers_when_of_numpy_then_as_those_of_python(client: tdserve.Client, name: str) -> None:
    five = np.int64(5)
    replay = client.create_replay(
        name, rows(0)[0], five, min_size=five, max_times_sampled=five, sampler=tdserve.WithoutReplacement(seed=five)
    )
    with replay.writer(batch=five, max_bytes=np.int64(1 << 20)) as writer:
        for row in rows(*range(5)):
            writer.append(row)
    assert sorted(numbers(replay.sample(five))) == list(range(5))
    with replay.batches(five, prefetch=five) as batches:
        assert sorted(numbers(next(batches))) == list(range(5))
    again = client.create_replay(
        name, rows(0)[0], 5, min_size=5, max_times_sampled=5, sampler=tdserve.WithoutReplacement(seed=5), exists_ok=True
    )
    assert again.info()["settings"] == replay.info()["settings"]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"limiter": tdserve.MinSize(9)}, "capacity of 8"),
        ({"limiter": tdserve.Queue(9)}, "capacity of 8"),
        ({"limiter": tdserve.SampleToInsertRatio(4.0, min_size=1, error_buffer=1.0)}, "too small"),
        ({"limiter": tdserve.SampleToInsertRatio(1.0, min_size=9, error_buffer=5.0)}, "capacity of 8"),
        (
            {"limiter": tdserve.SampleToInsertRatio(4.0, min_size=1, error_buffer=9.0), "max_times_sampled": 2},
            "max_times_sampled",
        ),
        ({"sampler": tdserve.Slices(slice_len=9)}, "capacity of 8"),
    ],
)
def test_settings_when_they_could_let_nothing_through_then_refused_with_the_reason(
    client: tdserve.Client, name: str, settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(tdserve.InvalidRequestError, match=reason):
        create(client, name, 8, **settings)
    assert name not in client


def test_set_limiter_when_callers_wait_then_the_new_one_wakes_them(server: tdserve.Server, name: str) -> None:
    with server.client(timeout_s=30.0) as waiting, server.client(timeout_s=30.0) as changing:
        create(waiting, name, 16, num_rows=4, limiter=tdserve.Queue(4))
        table = changing.replay(name)
        extend = waiting.run_later(lambda: waiting.replay(name).extend(rows(4, 5)))
        wait_for(lambda: table.info()["num_waiting"] == 1, "a writer that waits for room")
        table.set_limiter(tdserve.Queue(8))
        assert extend.result(20.0).tolist() == [4, 5]
        table.set_limiter(tdserve.MinSize(7))
        samples = [waiting.run_later(lambda: waiting.replay(name).sample(6)) for _ in range(2)]
        wait_for(lambda: table.info()["num_waiting"] == 2, "two samplers that wait for a row")
        table.set_limiter(tdserve.MinSize(6))
        assert [len(sample.result(20.0)) for sample in samples] == [6, 6]
        assert table.info()["num_waiting"] == 0
        assert waiting.replay(name).settings.limiter == tdserve.MinSize(6)


# ---------------------------------------------------------------- bad input

BAD: dict[str, tuple[Callable[[Any], Any], type[Exception]]] = {
    "priority nan": (lambda t: t.update_priority([0, 1], [1.0, float("nan")]), tdserve.InvalidRequestError),
    "priority negative": (lambda t: t.update_priority([0, 1], [1.0, -1.0]), tdserve.InvalidRequestError),
    "priority infinite": (lambda t: t.update_priority([0], float("inf")), tdserve.InvalidRequestError),
    "priorities too few": (lambda t: t.update_priority([0, 1, 2], [1.0, 2.0]), tdserve.InvalidRequestError),
    "priority out of range": (lambda t: t.update_priority([0, 8], 1.0), tdserve.SelectionError),
    "priority below range": (lambda t: t.update_priority([-1], 1.0), tdserve.SelectionError),
    "priority of a deleted row": (lambda t: t.update_priority([0, 4], 1.0), tdserve.SelectionError),
    "priority out of range with generation": (
        lambda t: t.update_priority([0, 99], 1.0, generation=2),
        tdserve.SelectionError,
    ),
    "extend nan": (lambda t: t.extend(rows(7, 8), priority=[1.0, float("nan")]), tdserve.InvalidRequestError),
    "extend negative": (lambda t: t.extend(rows(7), priority=-0.5), tdserve.InvalidRequestError),
    "delete out of range": (lambda t: t.delete([0, 8]), tdserve.SelectionError),
    "delete below range, like the bytes of a run": (lambda t: t.delete([-1, 0, 2]), tdserve.SelectionError),
    "priority below range, like the bytes of few": (
        lambda t: t.update_priority([-2, 1, 5], 9.0),
        tdserve.SelectionError,
    ),
    "ack below range, like the bytes of a run": (lambda t: t.ack([-1, 0, 2], consumer="c"), tdserve.TDServeError),
    "delete a deleted row": (lambda t: t.delete([0, 4]), tdserve.SelectionError),
    "delete no rows": (lambda t: t.delete(["a"]), tdserve.InvalidRequestError),
    "set_at_ a deleted row": (lambda t: t.set_at_("number", 7, [0, 4]), tdserve.SelectionError),
    "set_at_ out of range": (lambda t: t.set_at_("number", 7, [0, 8]), tdserve.SelectionError),
    "set_at_ an unknown key": (lambda t: t.set_at_("reward", 7, [0]), tdserve.KeyNotFoundError),
    "set_at_ of another shape": (lambda t: t.set_at_("obs", torch.zeros(1, 4), [0]), tdserve.SpecMismatchError),
    "read a deleted row": (lambda t: t[[0, 4]], tdserve.SelectionError),
    "sample nothing": (lambda t: t.sample(0), tdserve.InvalidRequestError),
    "sample less": (lambda t: t.sample(-3), tdserve.InvalidRequestError),
    "batches of nothing": (lambda t: t.batches(0), tdserve.InvalidRequestError),
    "require an unknown key": (lambda t: t.sample(1, require=("reward",)), tdserve.KeyNotFoundError),
    "group by an unknown key": (lambda t: t.sample(2, group_by="id", group_size=2), tdserve.KeyNotFoundError),
    "groups of nothing": (lambda t: t.sample(2, group_by="number", group_size=0), tdserve.InvalidRequestError),
    "half a group": (lambda t: t.sample(3, group_by="number", group_size=2), tdserve.InvalidRequestError),
    "more groups than fit": (
        lambda t: t.sample(16, group_by="number", group_size=2, timeout_s=0),
        tdserve.InvalidRequestError,
    ),
    "more for a consumer than fit": (lambda t: t.sample(9, consumer="c", timeout_s=0), tdserve.InvalidRequestError),
    "limiter": (lambda t: t.set_limiter(tdserve.MinSize(9)), tdserve.InvalidRequestError),
    "no sampler": (lambda t: t.set_sampler(tdserve.MinSize(1)), tdserve.NotSupportedError),
    "no limiter": (lambda t: t.set_limiter("fast"), tdserve.NotSupportedError),
    "ack what was not taken": (lambda t: t.ack([0], consumer="c"), tdserve.WrongStateError),
}


@pytest.mark.parametrize("case", BAD)
def test_call_when_its_input_is_bad_then_typed_error_and_the_table_is_unchanged(
    client: tdserve.Client, name: str, case: str
) -> None:
    call, error = BAD[case]
    replay = create(client, name, 8, sampler=tdserve.Prioritized(alpha=1.0))
    replay.extend(rows(*range(6)), priority=[1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    replay.delete([4])
    before, content = replay.info(), replay[:]
    with pytest.raises(error) as raised:
        call(replay)
    assert isinstance(raised.value, tdserve.TDServeError)
    assert {**replay.info(), "samples": 0} == before
    assert difference(content, replay[:]) is None
    batch = replay.sample(400)
    assert dict(zip(numbers(batch), batch["priority"].tolist(), strict=True)) == {0: 1, 1: 2, 2: 3, 3: 4, 5: 6}


@pytest.mark.parametrize("sampler", [tdserve.Uniform(), tdserve.Fifo(), tdserve.WithoutReplacement()])
def test_sample_when_more_than_there_can_be_without_replacement_then_error(
    client: tdserve.Client, name: str, sampler: Any
) -> None:
    replay = create(client, name, 8, num_rows=8, sampler=sampler)
    if isinstance(sampler, tdserve.Uniform):
        assert len(replay.sample(9)) == 9  # it draws each row anew
    else:
        with pytest.raises(tdserve.InvalidRequestError, match="9"):
            replay.sample(9)
    assert len(replay.sample(8)) == 8


def test_update_priority_when_the_table_has_none_then_refused(client: tdserve.Client, name: str) -> None:
    replay = create(client, name, 8, num_rows=8)
    with raises(tdserve.InvalidRequestError, argument="priority"):
        replay.update_priority([0], 1.0)
    with raises(tdserve.InvalidRequestError, argument="priority"):
        replay.extend(rows(8), priority=1.0)
    assert replay.info()["inserts"] == 8


def test_draws_when_priorities_change_then_they_follow(client: tdserve.Client, name: str) -> None:
    replay = create(client, name, 16, num_rows=16, sampler=tdserve.Prioritized(alpha=1.0, eps=0.0))
    priority = np.arange(16.0)
    assert replay.update_priority(np.arange(16), priority) == 0
    counts = np.bincount(replay.sample(20_000)["index"].numpy(), minlength=16)
    assert counts[0] == 0
    assert chi_square.statistic(counts[1:], priority[1:] / priority.sum()) < chi_square.limit(15)
