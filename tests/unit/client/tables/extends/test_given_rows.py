"""What ``extend`` accepts as rows: one row, rows in several dimensions, more rows than a ring has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict, tensorclass

import tdserve
from tdserve.base.errors import InvalidRequestError, SpecMismatchError, TooLargeError
from tests.errors import raises


@tensorclass
class Step:
    a: torch.Tensor
    word: str


def rows(*batch_size: int, start: int = 0) -> TensorDict:
    """Rows that tell which they are."""
    numbers = torch.arange(start, start + torch.Size(batch_size).numel()).reshape(batch_size)
    return TensorDict({"a": numbers, "n": {"b": 10.0 * numbers}}, batch_size)


def create(client: tdserve.Client, name: str, capacity: int = 5, **settings: Any) -> tdserve.ReplayHandle:
    made: tdserve.ReplayHandle = client.create_replay(name, rows(), capacity, **settings)
    return made


def read_numbers(table: tdserve.ReplayHandle, index: Any = ...) -> Any:
    return table[index]["a"].tolist()


def test_extend_when_given_one_row_then_stored_as_one(client: tdserve.Client, name: str) -> None:
    table = create(client, name)
    assert table.extend(rows(start=7)).tolist() == [0]
    assert table.extend(rows(start=8), priority=None, return_early=True).result(20.0).tolist() == [1]
    assert table[0]["n", "b"].item() == 70
    assert read_numbers(table) == [7, 8]


def test_extend_when_rows_have_dimensions_then_their_number_decides(client: tdserve.Client, name: str) -> None:
    table = client.create_replay(name, rows(3), 8)
    assert table.extend(rows(3, start=5)).tolist() == [0]
    assert table.extend(rows(3, 3)).tolist() == [1, 2, 3]
    assert table[:]["a"].tolist() == [[5, 6, 7], [0, 1, 2], [3, 4, 5], [6, 7, 8]]
    for batch in (rows(4), rows(3, 4), rows()):
        with pytest.raises(SpecMismatchError):
            table.extend(batch)
    assert table.extend(rows(2, 2, 3), flatten=True).tolist() == [[4, 5], [6, 7]]
    assert len(table) == 8


@pytest.mark.parametrize("lengths", [(2, 4), (3, 3)])
def test_extend_when_the_row_is_ragged_then_stored_as_one(
    client: tdserve.Client, name: str, lengths: tuple[int, ...]
) -> None:
    like = TensorDict({"tokens": torch.zeros(lengths[0])}, [])
    table = client.create_replay(name, like, 4, ragged=["tokens"])
    for number, length in enumerate(lengths):
        assert table.extend(TensorDict({"tokens": torch.arange(float(length))}, [])).tolist() == [number]
    assert table[1]["tokens"].tolist() == list(range(lengths[1]))


def test_extend_when_the_row_is_an_instance_with_values_then_stored_as_one(client: tdserve.Client, name: str) -> None:
    row: Any = Step(a=torch.tensor(3), word="x")
    table = client.create_replay(name, row, 4)
    assert table.extend(row).tolist() == [0]
    assert (table[0].a.item(), table[0].word) == (3, "x")


def test_extend_when_flattened_then_numbers_have_the_form_of_the_rows(client: tdserve.Client, name: str) -> None:
    table = create(client, name, 10, sampler=tdserve.Prioritized())
    batch = rows(2, 3)
    index = table.extend(batch, flatten=True, priority=batch["a"] + 1.0)
    assert index.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert (table[index] == batch).all()
    sample = table.sample(64)
    assert torch.equal(sample["priority"], sample["a"] + 1.0)
    early = table.extend(rows(2, 2, start=6), flatten=True, return_early=True)
    assert early.result(20.0).tolist() == [[6, 7], [8, 9]]
    assert table.extend(rows(2, 0), flatten=True).shape == (2, 0)


def test_extend_when_of_columns_that_are_not_contiguous_then_in_row_major_order(
    client: tdserve.Client, name: str
) -> None:
    table = create(client, name, 10)
    batch: Any = rows(3, 2)
    batch = batch.transpose(0, 1)
    assert table.extend(batch, flatten=True).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert read_numbers(table) == [0, 2, 4, 1, 3, 5]


def test_extend_when_rows_have_several_dimensions_and_are_not_to_be_flattened_then_error_names_the_argument(
    client: tdserve.Client, name: str
) -> None:
    table = create(client, name)
    with pytest.raises(SpecMismatchError, match="flatten=True"):
        table.extend(rows(2, 2))
    with raises(InvalidRequestError, argument="priority"):
        table.extend(rows(2, 1), flatten=True, priority=torch.zeros(1, 2))
    assert len(table) == 0


def test_extend_when_flattened_then_no_trajectory_goes_from_one_line_to_the_next(
    client: tdserve.Client, name: str
) -> None:
    table = create(client, name, 100, sampler=tdserve.Slices(slice_len=4))
    ends = torch.zeros(3, 6, dtype=torch.bool)
    ends[1, 1] = True  # the first two rows of this line are too short for a slice
    table.extend(rows(3, 6), flatten=True, ends=ends)
    starts = table.sample(400)["a"].reshape(-1, 4)[:, 0].unique().tolist()
    assert starts == [0, 1, 2, 8, 12, 13, 14]


@pytest.mark.slow
@pytest.mark.parametrize("num_before", [0, 3, 400])
def test_extend_when_there_are_more_rows_than_the_ring_has_then_the_newest_are_stored(
    client: tdserve.Client, name: str, num_before: int
) -> None:
    table = create(client, name)
    for number in range(num_before):  # from some on, into claimed rows
        table.extend(rows(1, start=number))
    for start, is_early in ((1_000, False), (2_000, True)):
        found = table.extend(rows(12, start=start), return_early=is_early)
        index = found.result(20.0) if is_early else found
        assert index[:7].tolist() == [-1] * 7
        assert sorted(index[7:].tolist()) == list(range(5))
        assert read_numbers(table, index[7:]) == list(range(start + 7, start + 12))
    assert len(table) == 5
    assert table.info()["inserts"] == num_before + 10


def test_extend_when_annotated_rows_are_too_many_then_each_keeps_its_own(client: tdserve.Client, name: str) -> None:
    table = create(client, name, sampler=tdserve.Prioritized(alpha=1.0))
    index = table.extend(rows(2, 4), flatten=True, priority=torch.arange(8.0).reshape(2, 4) + 1)
    assert index.shape == (2, 4)
    assert index[0, :3].tolist() == [-1] * 3
    sample = table.sample(64)
    assert torch.equal(sample["priority"], sample["a"] + 1.0)
    assert sample["a"].min() >= 3
    with raises(InvalidRequestError, argument="priority"):
        table.extend(rows(8), priority=torch.ones(5))


@pytest.mark.parametrize(
    "settings",
    [
        {"limiter": tdserve.SampleToInsertRatio(1.0, min_size=1, error_buffer=100.0)},
        {"remover": tdserve.LowestPriority()},
    ],
)
def test_extend_when_too_many_rows_would_not_replace_the_oldest_then_refused(
    client: tdserve.Client, name: str, settings: dict[str, Any]
) -> None:
    table = create(client, name, **settings)
    with pytest.raises(TooLargeError, match=name):
        table.extend(rows(6))
    assert table.info()["inserts"] == 0


def test_extend_when_another_client_has_set_a_limiter_that_blocks_then_too_many_rows_are_refused(
    server: tdserve.Server, client: tdserve.Client, name: str
) -> None:
    table = create(client, name)
    with server.client() as other:
        other.replay(name).set_limiter(tdserve.SampleToInsertRatio(1.0, min_size=1, error_buffer=100.0))
    with pytest.raises(TooLargeError, match=name):
        table.extend(rows(6))


def test_extend_when_the_table_was_made_anew_with_room_for_all_then_all_are_stored(
    client: tdserve.Client, name: str
) -> None:
    table = create(client, name)
    client.delete(name)
    create(client, name, 9)
    assert -1 not in table.extend(rows(8))
    assert read_numbers(table) == list(range(8))


def test_extend_when_other_dtypes_lose_nothing_then_converted(client: tdserve.Client, name: str) -> None:
    table = create(client, name)
    batch = rows(3)
    batch["a"], batch["n", "b"] = batch["a"].to(torch.int16), batch["n", "b"].to(torch.float16)
    table.extend(batch)
    with table.writer() as writer:
        writer.append(batch[2])
    found = table[:]
    assert (found["a"].dtype, found["a"].tolist()) == (torch.int64, [0, 1, 2, 2])
    assert (found["n", "b"].dtype, found["n", "b"].tolist()) == (torch.float32, [0, 10, 20, 20])
    table.set_at_("a", torch.tensor([7], dtype=torch.uint8), [0])
    assert table[0]["a"].item() == 7
    batch["n", "b"] = batch["n", "b"].to(torch.float64)
    with pytest.raises(SpecMismatchError, match="float32 does not hold all values"):
        table.extend(batch)
    with pytest.raises(SpecMismatchError, match="float32 does not hold all values"):
        table.set_at_(("n", "b"), batch["n", "b"], [0, 1, 2])


def test_send_when_other_dtypes_lose_nothing_then_converted(client: tdserve.Client, name: str) -> None:
    client.init_remote(rows(3), name)
    batch = rows(3, start=5)
    batch["a"] = batch["a"].to(torch.int32)
    client.send(batch, name)
    assert client.from_remote_init(name)["a"].tolist() == [5, 6, 7]
    assert client.from_remote_init(name)["a"].dtype is torch.int64


def test_extend_when_rows_were_sampled_then_what_the_sample_added_is_ignored(client: tdserve.Client, name: str) -> None:
    source = create(client, name, sampler=tdserve.Prioritized(), max_times_sampled=9)
    source.extend(rows(4))
    target = create(client, f"{name}.target")
    sample = source.sample(3)
    assert {"index", "generation", "priority", "times_sampled"} <= set(sample.keys())
    index = target.extend(sample)
    with target.writer() as writer:
        writer.append(sample[0])
    assert read_numbers(target) == [*sample["a"].tolist(), sample["a"][0].item()]
    assert (target[index] == sample.select("a", "n")).all()


def test_extend_when_rows_were_sampled_from_a_table_of_instances_then_they_are_instances_again(
    client: tdserve.Client, name: str
) -> None:
    table = client.create_replay(name, Step(a=torch.tensor(3), word="x"), 4)
    table.extend(Step(a=torch.tensor(3), word="x"))
    table.extend(table.sample(2))
    assert [(row.a.item(), row.word) for row in table] == [(3, "x")] * 3


def test_extend_when_a_key_of_samples_is_one_of_the_rows_too_then_stored(client: tdserve.Client, name: str) -> None:
    like = rows().set("slice_end", torch.tensor(0.0))
    table = client.create_replay(name, like, 4)
    table.extend(rows(1).set("slice_end", torch.tensor([2.5])))
    assert table[0]["slice_end"].item() == 2.5
