from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tdserve.base.errors import InvalidRequestError
from tdserve.client.tables.row_annotations import RowAnnotations
from tdserve.rules.replay.settings import Settings
from tdserve.v1 import control_pb2
from tests.errors import raises

POLICY = Settings(policy="p")


def encode_versions(version: Any, settings: Settings = POLICY) -> list[int]:
    """Returns the policy versions in a request of two rows."""
    request = control_pb2.ExtendRequest(store="r", num_rows=2)
    RowAnnotations(policy_version=version).add_to(request, settings)
    return [int(number) for number in np.frombuffer(request.policy_versions.data, "<i8")]


@pytest.mark.parametrize("given", [3, np.int64(3), torch.tensor(3), np.array(3)])
def test_add_to_when_one_version_is_given_then_it_stands_for_all(given: Any) -> None:
    assert encode_versions(given) == [3]


@pytest.mark.parametrize(
    "given", [torch.tensor([3, 0]), np.array([3, 0], np.uint8), torch.tensor([3, 0]).int(), [3, 0], (np.int64(3), 0)]
)
def test_add_to_when_each_row_has_a_version_then_all_are_sent(given: Any) -> None:
    assert encode_versions(given) == [3, 0]


@pytest.mark.parametrize(
    "given",
    [
        -1,
        True,
        1.0,
        "1",
        [1, -2],
        [1.0, 2.0],
        [1, 2, 3],
        torch.tensor(True),
        torch.tensor([1]),
        torch.tensor([1.0, 2.0]),
        np.array([1, -1]),
    ],
    ids=repr,
)
def test_add_to_when_it_is_no_version_then_refused(given: Any) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        encode_versions(given)
    assert raised.value.argument == "policy_version"


def test_add_to_when_the_table_has_no_policy_then_no_version_is_accepted() -> None:
    assert encode_versions(None, Settings()) == []
    with pytest.raises(InvalidRequestError, match="without a policy"):
        encode_versions(0, Settings())


def test_add_to_when_ends_are_no_flags_then_refused() -> None:
    request = control_pb2.ExtendRequest(store="r", num_rows=2)
    RowAnnotations(priority=[1.0, 2.0], ends=torch.tensor([False, True])).add_to(request, POLICY)
    assert (request.ends.data, len(request.priorities.data)) == (b"\0\1", 16)
    for ends in (torch.tensor([0, 1]), torch.tensor([True] * 3)):
        with raises(InvalidRequestError, argument="ends"):
            RowAnnotations(ends=ends).add_to(request, POLICY)
