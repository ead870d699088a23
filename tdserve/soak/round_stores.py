"""The stores of a run and the content of their rows, which shows its writer and whether it is whole."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import NonTensorStack, TensorDict, TensorDictBase

import tdserve
from tdserve.base.errors import RemoteProtocolError
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
ENTRIES = "entries"
"""Name of the keyed store."""

WEIGHTS = "weights"
NUM_KEYS = 8
"""Keys of each client in the keyed store."""

BODY = 24
"""Numbers in a row's body, all computed from the row's identity, so that a torn row shows."""


def choose_shards(client: tdserve.Client) -> Any:
    """Returns on how many servers tables and the queue are: of three, on two, so that parts can move to the third."""
    return 2 if isinstance(client, ClusterClient) and len(client.members) > 2 else "all"


def list_movable() -> list[str]:
    """Returns the stores, and parts of shared ones, that a server can hand over to another."""
    return [WEIGHTS, SLOTS, KEYS, ENTRIES, *(f"{name}#{shard}" for name in (*TABLES, QUEUE) for shard in range(2))]


class RoundStores:
    """The stores of one round, whose names begin with the same letters; those that every client opens.

    Args:
        client: A client of the server, or of several.
        prefix: Beginning of all names, different for every round on one server.
    """

    def __init__(self, client: tdserve.Client, prefix: str = "") -> None:
        self.client = client
        self.prefix = prefix

    def name(self, store: str) -> str:
        """Returns the full name of a store."""
        return self.prefix + store

    def create(self) -> None:
        """Creates what clients open; once for each round."""
        shards = choose_shards(self.client)
        for name in TABLES:
            self.client.create_replay(
                self.name(name),
                like=make_rows(name, 0, 0, 1)[0],
                capacity=CAPACITY,
                sampler=tdserve.Prioritized() if name == "asked" else None,
                shards=shards,
            )
        job = TensorDict({"job": torch.tensor(0)}, [])
        self.client.create_queue(self.name(QUEUE), like=job, max_size=6_000, shards=shards)
        self.client.create_kv(self.name(ENTRIES))
        self.client.memmap(make_slots(0, NUM_SLOTS), self.name(SLOTS))
        self.client.memmap(TensorDict({"x": torch.zeros(3)}, [3]), self.name(KEYS))

    def list_names(self) -> list[str]:
        """Returns the full names of all stores of the round that exist."""
        return [name for name in self.client.stores() if name.startswith(self.prefix)]

    def open_table(self, name: str) -> tdserve.ReplayHandle:
        """Opens a table."""
        table: tdserve.ReplayHandle = self.client.replay(self.name(name))
        return table

    def open_queue(self) -> tdserve.QueueHandle:
        """Opens the queue."""
        queue: tdserve.QueueHandle = self.client.queue(self.name(QUEUE))
        return queue

    def open_entries(self) -> tdserve.KeyedHandle:
        """Opens the keyed store."""
        entries: tdserve.KeyedHandle = self.client.kv(self.name(ENTRIES))
        return entries


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
        RemoteProtocolError: A row is not what its writer made.
    """
    writer, number, body = rows["writer"], rows["number"], rows["body"]
    torn = (body != (number + 1_000_003 * writer)[:, None] + torch.arange(BODY)).any(-1)
    _expect(not torn.any(), f"whole rows of {table!r}", f"torn ones: {number[torn].tolist()[:10]}")
    found = list(zip(writer.tolist(), number.tolist(), strict=True))
    if table == "chats":
        texts = [f"{one}/{each}" for one, each in found]
        _expect(list(rows["text"]) == texts, f"values of {table!r} in the order of the rows", "those of other rows")
    return found


def make_slots(value: int, num_rows: int) -> TensorDict:
    """Returns rows of the store that is overwritten, all with one value."""
    return TensorDict(
        {"value": torch.full((num_rows,), value), "body": torch.full((num_rows, BODY), value)}, [num_rows]
    )


def read_slot_values(rows: TensorDictBase) -> list[int]:
    """Returns the values of slots.

    Raises:
        RemoteProtocolError: A row is torn.
    """
    torn = (rows["body"] != rows["value"][:, None]).any(-1)
    _expect(not torn.any(), "whole slots", f"torn ones: {rows['value'][torn].tolist()}")
    values: list[int] = rows["value"].tolist()
    return values


def make_part(value: int) -> TensorDict:
    """Returns a nested tensordict with a tensor and a value, which is added, renamed and removed as a whole."""
    return TensorDict({"number": torch.full((3,), value), "text": str(value)}, [3])


def check_part(part: TensorDictBase, value: int) -> None:
    """Raises RemoteProtocolError if a part differs from the result of ``make_part``."""
    found = (part["number"].tolist(), part["text"])
    _expect(found == ([value] * 3, str(value)), f"part {value}", repr(found))


def make_entry(value: int) -> dict[str, Any]:
    """Returns a value of the keyed store, which shows whether it is whole."""
    return {"value": value, "body": [value] * BODY}


def read_entry(entry: dict[str, Any]) -> int:
    """Returns the number of an entry of the keyed store.

    Raises:
        RemoteProtocolError: It is not whole.
    """
    value: int = entry["value"]
    _expect(entry == make_entry(value), f"entry {value}", repr(entry)[:200])
    return value


def _expect(holds: bool, expected: str, received: str) -> None:
    if not holds:
        raise RemoteProtocolError(expected=expected, received=received)
