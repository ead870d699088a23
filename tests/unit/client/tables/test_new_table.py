from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict, UnbatchedTensor

import tdserve
from tdserve.base.errors import InvalidRequestError, KeyNotFoundError, NotSupportedError, StoreExistsError
from tdserve.client.session.store_options import StoreOptions
from tdserve.client.tables.new_table import create_table
from tdserve.rules.replay.settings import Settings
from tests.errors import raises

ROW = TensorDict({"a": torch.zeros(2)}, [])
NEW, ANY = StoreOptions(False, None, None), StoreOptions(True, None, None)


def test_create_table_when_it_exists_then_refused_or_the_one_there_is(client: tdserve.Client, name: str) -> None:
    made = create_table(client, name, ROW, 5, Settings(), NEW, None)
    with pytest.raises(StoreExistsError):
        create_table(client, name, ROW, 5, Settings(), NEW, None)
    assert create_table(client, name, ROW, 5, Settings(), ANY, None).uid == made.uid
    with pytest.raises(StoreExistsError):
        create_table(client, name, ROW, 6, Settings(), ANY, None)


def test_create_table_when_its_rows_differ_in_size_by_now_then_it_is_the_same(
    client: tdserve.Client, name: str
) -> None:
    create_table(client, name, ROW, 5, Settings(), NEW, None)
    jagged = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)
    client.replay(name).extend(TensorDict({"a": jagged}, [2]))
    found = create_table(client, name, ROW, 5, Settings(), ANY, None)
    assert found.spec.has_ragged
    assert found.num_rows == 2


def test_create_table_when_a_leaf_cannot_be_of_rows_then_refused_and_nothing_is_made(
    client: tdserve.Client, name: str
) -> None:
    unbatched: Any = UnbatchedTensor  # which has no annotations
    shared = TensorDict({"a": torch.zeros(2), "u": unbatched(torch.zeros(3))}, [])
    with pytest.raises(NotSupportedError, match="UnbatchedTensor at key 'u'"):
        create_table(client, name, shared, 5, Settings(), NEW, None)
    with pytest.raises(InvalidRequestError, match="like: None is not a tensordict"):
        create_table(client, name, None, 5, Settings(), NEW, None)
    by_step = Settings(sampler=tdserve.Slices(4, trajectory_key="episode"))
    with raises(KeyNotFoundError, key="episode"):
        create_table(client, name, ROW, 5, by_step, NEW, None)
    assert name not in client
