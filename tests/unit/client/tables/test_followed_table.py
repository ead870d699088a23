"""What a handle of a table consists of, each part made alone."""

from __future__ import annotations

import pickle

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.base.errors import KeyNotFoundError, SpecMismatchError, StructureChangedError
from tdserve.client.tables.draws.draw_arguments import Conditions
from tdserve.client.tables.followed_table import FollowedTable
from tdserve.client.tables.row_annotations import RowAnnotations
from tdserve.client.tables.row_draws import RowDraws
from tdserve.client.tables.row_extends import RowExtends
from tdserve.client.tables.rows_by_number import RowsByNumber
from tdserve.v1 import control_pb2

ROW = TensorDict({"a": torch.tensor(0)})


def rows(num_rows: int, start: int = 0) -> TensorDict:
    """Rows with numbers from ``start`` on."""
    return TensorDict({"a": torch.arange(start, start + num_rows)}, [num_rows])


@pytest.fixture
def handle(client: tdserve.Client, name: str) -> tdserve.ReplayHandle:
    """A ring of eight rows, of which another one than the test's own part has written four."""
    made: tdserve.ReplayHandle = client.create_replay(name, ROW, 8)
    made.extend(rows(4))
    return made


@pytest.fixture
def followed(client: tdserve.Client, handle: tdserve.ReplayHandle) -> FollowedTable:
    """The table, as of now."""
    return FollowedTable(client, client.describe(handle.name), control_pb2.STORE_KIND_REPLAY)


def test_table_when_rows_get_a_leaf_then_its_key_is_found_and_queries_are_renewed(
    handle: tdserve.ReplayHandle, followed: FollowedTable, client: tdserve.Client
) -> None:
    query = RowDraws(followed).make_query()
    assert followed.renew(query, client.make_deadline(None)) is None
    handle.add_leaves(TensorDict({"b": torch.tensor(0.0)}))
    followed.check_key(("b",), client.make_deadline(None))
    renewed = followed.renew(query, client.make_deadline(None))
    assert renewed is not None
    assert renewed.stored is followed.stored
    assert ("b",) in followed.spec.leaf_paths
    with pytest.raises(KeyNotFoundError):
        followed.check_key(("c",), client.make_deadline(None))


def test_table_when_made_anew_with_another_capacity_then_is_followed_unless_it_is_a_part(
    handle: tdserve.ReplayHandle, followed: FollowedTable, client: tdserve.Client
) -> None:
    part = FollowedTable(client, client.describe(handle.name), control_pb2.STORE_KIND_REPLAY)
    part.is_part = True
    assert (followed.meant["capacity"], part.meant["capacity"]) == (0, 8)
    client.delete(handle.name)
    client.create_replay(handle.name, ROW, 5)
    assert followed.follow_changed(client.make_deadline(None))
    assert followed.capacity == 5
    with pytest.raises(StructureChangedError, match="made anew"):
        part.follow_changed(client.make_deadline(None))
    assert part.capacity == 8


def test_table_when_pickled_then_the_copy_works_over_a_client_of_its_process(followed: FollowedTable) -> None:
    copied = pickle.loads(pickle.dumps(followed))
    assert copied.client is not followed.client
    assert RowsByNumber(copied).read([1])["a"].tolist() == [1]


def test_rows_by_number_when_read_then_have_numbers_and_generations(followed: FollowedTable) -> None:
    by_number = RowsByNumber(followed)
    assert by_number.read(slice(1, 3), (("a",),))["a"].tolist() == [1, 2]
    assert [row["a"].item() for row in by_number.iterate()] == [0, 1, 2, 3]
    found, numbers, generations = by_number.read_numbered(slice(2, None))
    assert found["a"].tolist() == numbers.tolist() == [2, 3]
    assert by_number.read_with_generations(numbers.numpy())[1].equal(generations)


def test_rows_by_number_when_the_iteration_goes_on_under_another_device_then_rows_are_on_the_cpu(
    followed: FollowedTable,
) -> None:
    iterator = RowsByNumber(followed).iterate()
    with torch.device("meta"):
        found = list(iterator)
    assert [row["a"].tolist() for row in found] == [0, 1, 2, 3]


def test_extends_when_rows_fit_or_not_then_they_are_written_or_refused_and_counted(
    followed: FollowedTable, client: tdserve.Client
) -> None:
    extends, deadline = RowExtends(followed), client.make_deadline(None)
    numbers = extends.extend(rows(2, 4), RowAnnotations(), deadline, flatten=False, return_early=False)
    assert numbers.tolist() == [4, 5]
    with pytest.raises(SpecMismatchError):
        extends.check(TensorDict({"z": torch.zeros(1)}, [1]), None)
    assert RowsByNumber(followed).read(numbers)["a"].tolist() == [4, 5]


def test_draws_when_rows_are_taken_then_a_consumer_has_them_once(followed: FollowedTable) -> None:
    draws = RowDraws(followed)
    conditions = Conditions(consumer="learner")
    with draws.take(4, conditions, None, pad=None, numpy=None) as taken:
        assert sorted(taken["a"].tolist()) == [0, 1, 2, 3]
    with pytest.raises(tdserve.DeadlineExceededError):
        draws.take(1, conditions, 0.0, pad=None, numpy=None)
