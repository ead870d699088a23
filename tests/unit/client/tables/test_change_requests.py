from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

import tdserve
from tdserve.base.deadline import Deadline
from tdserve.base.errors import InvalidRequestError, StoreNotFoundError
from tdserve.client.tables.change_requests import MAX_MESSAGE_ROWS, change, encode_priorities
from tdserve.messages.row_numbers import decode_rows
from tdserve.v1 import control_pb2
from tests.errors import raises

ROWS = TensorDict({"a": torch.arange(4)}, [4])
SAMPLED = TensorDict({"index": torch.tensor([3, 1]), "generation": torch.tensor([2, 4])}, [2])


def test_priorities_messages_when_of_a_sampled_batch_then_brings_its_generations() -> None:
    (message,) = encode_priorities(SAMPLED, torch.tensor([0.5, 2.0]), None)
    assert decode_rows(message.rows).tolist() == [3, 1]
    assert np.frombuffer(message.priorities, "<f4").tolist() == [0.5, 2.0]
    assert np.frombuffer(message.generations, "<u4").tolist() == [2, 4]


def test_priorities_messages_when_rows_are_numbers_then_has_generations_only_where_they_are_given() -> None:
    assert encode_priorities([1, 2], 1.0, None)[0].generations == b""
    assert np.frombuffer(encode_priorities([1, 2], 1.0, [6, 6])[0].generations, "<u4").tolist() == [6]
    assert np.frombuffer(encode_priorities([1, 2], 1.0, [6, 8])[0].generations, "<u4").tolist() == [6, 8]
    assert np.frombuffer(encode_priorities([1, 2], 1.0, 6)[0].generations, "<u4").tolist() == [6]


def test_priorities_messages_when_generations_are_of_other_rows_then_error() -> None:
    with pytest.raises(InvalidRequestError) as raised:
        encode_priorities([1, 2], 1.0, [2, 2, 2])
    assert raised.value.argument == "generation"


def test_priorities_messages_when_a_priority_is_too_large_for_the_wire_then_still_finite() -> None:
    sent = np.frombuffer(encode_priorities([1, 2], [1e300, 1.0], None)[0].priorities, "<f4")
    assert np.isfinite(sent).all()
    assert sent[0] > 1e38


def test_change_when_the_session_was_lost_before_then_done_once(client: tdserve.Client, name: str) -> None:
    replay = client.create_replay(name, ROWS[0], 8)
    replay.extend(ROWS)
    client.session(Deadline.after(10.0)).close()
    assert change(client, name, Deadline.after(10.0), kind=control_pb2.STORE_KIND_REPLAY, clear=True).num_rows == 4
    assert len(replay) == 0


def test_change_when_there_is_no_table_then_error(client: tdserve.Client, name: str) -> None:
    with raises(StoreNotFoundError, name=name):
        change(client, name, Deadline.after(10.0), kind=control_pb2.STORE_KIND_REPLAY, close=True)


@pytest.mark.parametrize(("priority", "generation"), [("many", "many"), (2.0, 6), ("many", None)])
def test_priorities_messages_when_rows_are_very_many_then_each_is_of_some_of_them(
    priority: Any, generation: Any
) -> None:
    rows = np.arange(2 * MAX_MESSAGE_ROWS + 3) * 2
    priority = np.arange(len(rows)) / 4 if priority == "many" else priority
    generation = rows % 14 if generation == "many" else generation
    messages = encode_priorities(rows, priority, generation)
    assert len(messages) == 3
    assert max(message.ByteSize() for message in messages) <= 13 * MAX_MESSAGE_ROWS

    def joined(field: str, dtype: str) -> NDArray[Any]:
        parts = [np.frombuffer(getattr(message, field), dtype) for message in messages]
        return parts[0] if len(parts[0]) == 1 else np.concatenate(parts)

    named = np.concatenate([decode_rows(message.rows, max_rows=len(rows)) for message in messages])
    assert named.tolist() == rows.tolist()
    assert joined("priorities", "<f4").tolist() == np.asarray(priority, "<f4").reshape(-1).tolist()
    assert joined("generations", "<u4").tolist() == ([] if generation is None else np.reshape(generation, -1).tolist())
