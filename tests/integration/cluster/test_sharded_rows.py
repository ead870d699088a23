"""Rows of shared tables by their numbers: read, written, and refused where they do not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.base.errors import InvalidRequestError, SelectionError
from tests.errors import raises
from tests.integration.cluster.filling import fill_unequally, pick_one_of_each_shard, rows

pytestmark = pytest.mark.integration

ONE_DIMENSION = r"has one dimension of rows: give row numbers, a slice, or a"


@pytest.mark.slow
def test_rows_when_read_by_number_then_those(client: tdserve.ClusterClient, name: str) -> None:
    table = client.create_replay(name, rows(1)[0], 300, shards="all")
    fill_unequally(table)
    sample = table.sample(20)
    assert (table[sample["index"]]["number"] == sample["number"]).all()
    assert (table[sample["index"].reshape(4, 5)]["number"] == sample["number"].reshape(4, 5)).all()
    assert table[int(sample["index"][0])]["number"] == sample["number"][0]
    every = table[:]["number"].tolist()
    assert sorted(every) == list(range(75))
    assert table[::-2]["number"].tolist() == every[::-2]
    mask = torch.arange(75) % 3 == 0
    assert table[mask]["number"].tolist() == torch.tensor(every)[mask].tolist()
    assert [int(row["number"]) for row in table] == every
    empty: list[Any] = [[], torch.empty(0, dtype=torch.int64), torch.empty((2, 0), dtype=torch.int64), slice(3, 3)]
    for nothing in empty:
        shape = nothing.shape if isinstance(nothing, torch.Tensor) else (0,)
        assert table[nothing]["wide"].shape == (*shape, 30)
    table.set_at_("wide", torch.zeros(20, 30), sample)
    assert (table[sample["index"]]["wide"] == 0).all()
    assert table.delete(sample) == len(set(sample["number"].tolist()))
    assert table.delete(sample) == table.delete(sample["index"], generation=sample["generation"]) == 0
    left = sorted(set(every) - set(sample["number"].tolist()), key=every.index)
    assert table[:]["number"].tolist() == left
    assert [int(row["number"]) for row in table] == left
    assert table[5:40:3]["number"].tolist() == left[5:40:3]
    assert table[::-2]["number"].tolist() == left[::-2]
    mask = torch.arange(len(left)) % 3 == 0
    assert table[mask]["number"].tolist() == torch.tensor(left)[mask].tolist()
    with pytest.raises(SelectionError):
        table[sample["index"]]
    with pytest.raises(SelectionError):
        table[[300]]
    assert table.clear() == 75 - len(set(sample["number"].tolist()))
    assert table.counts().inserts == 75


def test_rows_when_an_index_adds_a_dimension_then_tables_of_one_and_of_all_servers_refuse_it_alike(
    client: tdserve.ClusterClient, servers: list[tdserve.Server], name: str
) -> None:
    shared = client.create_replay(name, rows(1)[0], 300, shards="all")
    with servers[0].client() as one:
        single = one.create_replay(f"{name}-single", rows(1)[0], 300)
        for index in (None, True, torch.tensor(False), np.True_, (None,), (0, 1)):
            for table in (shared, single):
                with pytest.raises(SelectionError, match=ONE_DIMENSION):
                    table[index]
                with pytest.raises(SelectionError, match=ONE_DIMENSION):
                    table.get_at("number", index)
        one.delete(f"{name}-single")


@pytest.mark.slow
def test_set_at_when_the_value_is_for_all_rows_then_each_gets_all_of_it(
    client: tdserve.ClusterClient, name: str
) -> None:
    like = TensorDict({"number": torch.tensor(0), "obs": torch.zeros(3), "text": "a"}, [])
    table = client.create_replay(name, like, 300, shards="all")
    for writer in (next(n for n in range(1, 1000) if table.choose_shard(n) == shard) for shard in range(3)):
        table.extend(TensorDict({"number": torch.arange(2), "obs": torch.zeros(2, 3), "text": "a"}, [2]), writer=writer)
    rows_of_all = pick_one_of_each_shard(table)
    table.set_at_("obs", torch.tensor([1.0, 2.0, 3.0]), rows_of_all)
    assert table[rows_of_all]["obs"].tolist() == [[1, 2, 3]] * 3
    table.set_at_("obs", torch.arange(9.0).reshape(3, 3), rows_of_all.flip(0))
    assert table[rows_of_all.flip(0)]["obs"].tolist() == torch.arange(9.0).reshape(3, 3).tolist()
    table.set_at_("number", 7, rows_of_all)
    assert table[rows_of_all]["number"].tolist() == [7, 7, 7]
    table.set_at_("text", ["x", "y", "z"], rows_of_all)
    assert list(table[rows_of_all]["text"]) == ["x", "y", "z"]
    with pytest.raises(tdserve.TDServeError):
        table.set_at_("obs", torch.zeros(4), rows_of_all)
    assert table[-2]["number"] == 7  # the last shard has two rows


@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, "all"])
def test_negative_numbers_when_rows_are_read_then_counted_from_the_last_live_one_as_on_one_server(
    user: tdserve.ClusterClient, name: str, shards: Any
) -> None:
    table: Any = user.create_replay(name, rows(1)[0], 300, shards=shards)
    for index in (-1, [-1], [0, -1]):
        with pytest.raises(SelectionError):
            table[index]
    first = int(table.extend(rows(4, 10), writer=next(n for n in range(1, 1000) if _is_in_shard(table, n, 1)))[0])
    assert [int(table[-1]["number"]), int(table[-4]["number"])] == [13, 10]
    assert table[torch.tensor([[-1, first], [first + 1, -2]])]["number"].tolist() == [[13, 10], [11, 12]]
    assert table.get_at("number", [-3, -1]).tolist() == [11, 13]
    assert table[-2:]["number"].tolist() == [12, 13]
    table.delete([first + 3, first + 1])
    assert table[-1]["number"] == 12
    with pytest.raises(SelectionError, match=f"{first + 1}.* not live"):
        table[-2]
    for beyond in (-(first + 4), [-1, -301]):
        with pytest.raises(SelectionError):
            table[beyond]
    writes: list[Callable[[], Any]] = [lambda: table.set_at_("number", 1, [-1]), lambda: table.delete([-1])]
    for write in writes:
        with raises(SelectionError, selection="-1"):
            write()


def _is_in_shard(table: Any, writer: int, shard: int) -> bool:
    return not hasattr(table, "choose_shard") or bool(table.choose_shard(writer) == shard)


@pytest.mark.slow
def test_calls_when_lengths_differ_then_refused_before_anything_is_written(
    client: tdserve.ClusterClient, name: str
) -> None:
    table = client.create_replay(name, rows(1)[0], 300, shards="all", sampler=tdserve.Prioritized())
    fill_unequally(table)
    numbers = pick_one_of_each_shard(table)
    with pytest.raises(InvalidRequestError):
        table.update_priority(numbers, [1.0, 2.0])
    with pytest.raises(InvalidRequestError):
        table.update_priority(numbers, 1.0, generation=[0, 0])
    with pytest.raises(InvalidRequestError):
        table["number"]
    with pytest.raises(SelectionError):
        table[torch.ones(5, dtype=torch.bool)]
    client.delete(name)
    keyed = client.create_kv(name, rows(1)[0], shards="all")
    for keys, values in (["a", "b"], rows(3)), (["a"], [1, 2]), (["a", "b"], [rows(1)[0]]), (3, 1):
        with pytest.raises(InvalidRequestError):
            keyed.put(keys, values)
    assert len(keyed) == 0


@pytest.mark.slow
def test_sample_when_it_is_no_whole_number_of_slices_then_refused(client: tdserve.ClusterClient, name: str) -> None:
    table = client.create_replay(name, rows(1)[0], 300, shards="all", sampler=tdserve.Slices(slice_len=4))
    fill_unequally(table)
    with pytest.raises(InvalidRequestError):
        table.sample(41, timeout_s=3.0)


def test_extend_when_rows_lack_the_key_of_their_shard_then_refused(client: tdserve.ClusterClient, name: str) -> None:
    with pytest.raises(InvalidRequestError):
        client.create_replay(name, rows(1)[0], 300, shards="all", shard_by="nope")
    table = client.create_replay(name, rows(1)[0], 300, shards="all", shard_by="number")
    assert len(table.extend(rows(0))) == 0
    with pytest.raises(InvalidRequestError):
        table.extend(rows(3).exclude("number"))
    with pytest.raises(InvalidRequestError):
        table.extend(rows(3), priority=[1.0, 2.0])
    with pytest.raises(InvalidRequestError):
        client.create_replay(f"{name}#0", rows(1)[0], 300, shards="all")
    with pytest.raises(InvalidRequestError):
        client.delete(f"{name}#0")


@pytest.mark.slow
def test_update_if_present_when_rows_are_of_several_shards_then_those_that_are_the_same(
    client: tdserve.ClusterClient, name: str
) -> None:
    table = client.create_replay(name, rows(1)[0], 300, shards="all", sampler=tdserve.Prioritized())
    fill_unequally(table)
    numbers = pick_one_of_each_shard(table)
    found, generations = table.get_with_generations(numbers)
    assert (table[numbers]["number"] == found["number"]).all()
    assert (table.find_generations(numbers) == generations).all()
    assert table.get_priorities(numbers).tolist() == [1.0] * 3
    table.delete(numbers[1:2])
    written = table.update_if_present(numbers, {"wide": torch.ones(3, 30)}, generation=generations)
    assert written.tolist() == [True, False, True]
    assert table[numbers[[0, 2]]]["wide"].sum() == 60
    assert table.find_generations(numbers)[1] == -1
