"""The stores of a campaign and the content of their rows, which shows its writer and whether it is whole."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import NonTensorStack, TensorDict, TensorDictBase

import tdserve
from tdserve.client.cluster.cluster_client import ClusterClient

TABLES = ("claimed", "asked", "chats")
"""A plain ring that local clients fill by claims, one for which every extend is requested, and one with values."""

CAPACITY = 1_500_000
NUM_SLOTS = 64
"""Number of rows in the store that is overwritten."""

SLOTS = "slots"
KEYS = "keys"
"""Name of the store whose keys change by whole tensordicts."""

QUEUE = "jobs"
WEIGHTS = "weights"
BODY = 24
"""Numbers in a row's body, all computed from the row's identity, so that a torn row shows."""


def choose_shards(client: tdserve.Client) -> Any:
    """Returns on how many servers tables and the queue are: of three, on two, so that parts can move to the third."""
    return 2 if isinstance(client, ClusterClient) and len(client.members) > 2 else "all"


def list_movable() -> list[str]:
    """Returns the stores, and parts of shared ones, that a server can hand over to another."""
    return [WEIGHTS, SLOTS, KEYS, *(f"{name}#{shard}" for name in (*TABLES, QUEUE) for shard in range(2))]


def open_tables(client: tdserve.Client) -> dict[str, tdserve.ReplayHandle]:
    """Opens the tables; the first client creates them."""
    like = {name: make_rows(name, 0, 0, 1)[0] for name in TABLES}
    return {
        name: client.create_replay(
            name,
            like=like[name],
            capacity=CAPACITY,
            sampler=tdserve.Prioritized() if name == "asked" else None,
            shards=choose_shards(client),
            exists_ok=True,
        )
        for name in TABLES
    }


def open_queue(client: tdserve.Client) -> tdserve.QueueHandle:
    """Opens the queue; the first client creates it."""
    like = TensorDict({"job": torch.tensor(0)}, [])
    return client.create_queue(QUEUE, like=like, max_size=6_000, shards=choose_shards(client), exists_ok=True)


def make_rows(table: str, writer: int, first: int, num_rows: int) -> TensorDict:
    """Returns row ``first`` and those that follow of a writer."""
    number = torch.arange(first, first + num_rows)
    body = (number + 1_000_003 * writer)[:, None] + torch.arange(BODY)
    rows = TensorDict({"writer": torch.full((num_rows,), writer), "number": number, "body": body}, [num_rows])
    if table == "chats":
        rows["text"] = NonTensorStack(*(f"{writer}/{each}" for each in number.tolist()))
    return rows


def identify_rows(table: str, rows: TensorDictBase) -> list[tuple[int, int]]:
    """Returns writer and number of each row.

    Raises:
        AssertionError: A row is not what its writer made.
    """
    writer, number, body = rows["writer"], rows["number"], rows["body"]
    torn = (body != (number + 1_000_003 * writer)[:, None] + torch.arange(BODY)).any(-1)
    assert not torn.any(), f"torn rows of {table!r}: {number[torn].tolist()[:10]}"
    found = list(zip(writer.tolist(), number.tolist(), strict=True))
    if table == "chats":
        texts = [f"{one}/{each}" for one, each in found]
        assert list(rows["text"]) == texts, f"values of {table!r} are of other rows"
    return found


def make_slots(value: int, num_rows: int) -> TensorDict:
    """Returns rows of the store that is overwritten, all with one value."""
    return TensorDict(
        {"value": torch.full((num_rows,), value), "body": torch.full((num_rows, BODY), value)}, [num_rows]
    )


def read_slot_values(rows: TensorDictBase) -> list[int]:
    """Returns the values of slots.

    Raises:
        AssertionError: A row is torn.
    """
    torn = (rows["body"] != rows["value"][:, None]).any(-1)
    assert not torn.any(), f"torn slots: {rows['value'][torn].tolist()}"
    values: list[int] = rows["value"].tolist()
    return values


def make_part(value: int) -> TensorDict:
    """Returns a nested tensordict with a tensor and a value, which is added, renamed and removed as a whole."""
    return TensorDict({"number": torch.full((3,), value), "text": str(value)}, [3])


def check_part(part: TensorDictBase, value: int) -> None:
    """Raises AssertionError if a part differs from the result of ``make_part``."""
    assert part["number"].tolist() == [value] * 3, f"part {value} has numbers {part['number'].tolist()}"
    assert part["text"] == str(value), f"part {value} has the text {part['text']!r}"
