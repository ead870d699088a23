from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from tdserve.base.errors import CorruptDataError
from tdserve.bench.workloads.chat import (
    NUM_TOKENS,
    check_histories,
    compute_nbytes,
    make_batch,
    make_histories,
    make_row,
)

HISTORIES = make_histories(8)


def batch_with(**changed: list[Any]) -> TensorDict:
    """Returns rows 5 and 2, with the given values in place of their own."""
    rows = {key: [HISTORIES[number][key] for number in (5, 2)] for key in HISTORIES[0]}
    rows.update(changed)
    return make_batch([dict(zip(rows, values, strict=True)) for values in zip(*rows.values(), strict=True)])


def test_histories_when_made_twice_then_are_equal_and_of_the_lengths_of_the_plan() -> None:
    check_histories(make_batch(make_histories(8)), HISTORIES, what="test")
    assert all(NUM_TOKENS[0] <= len(each["tokens"]) <= NUM_TOKENS[1] for each in HISTORIES)
    assert all(50 <= len(each["response"]) <= 500 and len(each["tool_call"]) == 4 for each in HISTORIES)
    assert len({len(each["tokens"]) for each in HISTORIES}) > 1


def test_history_when_weighed_then_counts_utf8_and_eight_bytes_a_token() -> None:
    history = {"prompt": "é", "response": "ab", "tool_call": {}, "tokens": torch.zeros(3, dtype=torch.int64)}
    assert compute_nbytes(history) == 2 + 2 + len("{}") + 24


def test_history_when_made_a_row_then_has_the_keys_of_a_batch() -> None:
    row = make_row(HISTORIES[0])
    assert row.batch_size == torch.Size([])
    assert set(row.keys()) == set(make_batch(HISTORIES).keys())
    assert row["prompt"] == HISTORIES[0]["prompt"]


def test_check_when_rows_come_in_any_order_and_twice_then_passes() -> None:
    check_histories(make_batch([HISTORIES[3], HISTORIES[3], HISTORIES[7]]), HISTORIES, what="test")


OTHER_CALL = {**HISTORIES[5]["tool_call"], "call_id": 5.0}  # was the integer
CHANGES: dict[str, list[Any]] = {
    "prompt": ["5 other", HISTORIES[2]["prompt"]],
    "response": ["other", HISTORIES[2]["response"]],
    "tool_call": [OTHER_CALL, HISTORIES[2]["tool_call"]],
    "tokens": [HISTORIES[5]["tokens"] + 1, HISTORIES[2]["tokens"]],
}


@pytest.mark.parametrize("key", CHANGES)
def test_check_when_one_value_of_a_row_differs_then_names_the_key(key: str) -> None:
    check_histories(batch_with(), HISTORIES, what="test")
    with pytest.raises(CorruptDataError, match=f"test, key '{key}'"):
        check_histories(batch_with(**{key: CHANGES[key]}), HISTORIES, what="test")


@pytest.mark.parametrize("prompt", ["8 too large", "no number"])
def test_check_when_a_row_is_no_history_then_corrupt_data(prompt: str) -> None:
    with pytest.raises(CorruptDataError, match="a history"):
        check_histories(batch_with(prompt=[prompt, HISTORIES[2]["prompt"]]), HISTORIES, what="test")


def test_check_when_tokens_came_back_in_another_type_then_refuses() -> None:
    batch = batch_with(tokens=[HISTORIES[number]["tokens"].int() for number in (5, 2)])
    with pytest.raises(CorruptDataError, match="tokens"):
        check_histories(batch, HISTORIES, what="test")


def test_batch_when_made_then_texts_and_calls_are_stacks_of_plain_values() -> None:
    batch = make_batch(HISTORIES)
    assert isinstance(batch.get("tool_call"), NonTensorStack)
    assert batch.get("tool_call").tolist()[1] == HISTORIES[1]["tool_call"]
