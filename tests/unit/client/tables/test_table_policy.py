from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from tdserve.base.errors import InvalidRequestError
from tdserve.client.tables.table_policy import check_policy_version, find_oldest_version, parse_max_lag
from tdserve.rules.replay.settings import Settings
from tests.errors import raises

POLICY = Settings(policy="p")


def test_parse_max_lag_when_it_is_not_possible_then_refused() -> None:
    assert [parse_max_lag(lag, POLICY, "r") for lag in (None, 0, 7)] == [None, 0, 7]
    assert parse_max_lag(None, Settings(), "r") is None
    for lag in (-1, True, 1.0):
        with raises(InvalidRequestError, argument="max_lag"):
            parse_max_lag(lag, POLICY, "r")
    with pytest.raises(InvalidRequestError, match="without a policy"):
        parse_max_lag(1, Settings(), "r")


def test_check_policy_version_when_it_does_not_fit_int64_then_refused() -> None:
    assert check_policy_version((1 << 63) - 1) == (1 << 63) - 1
    with pytest.raises(InvalidRequestError):
        check_policy_version(1 << 63)


def test_find_oldest_version_when_rows_differ_then_the_least() -> None:
    assert find_oldest_version(TensorDict({"policy_version": torch.tensor([4, 2, 3])}, [3])) == 2
