"""Content of messages in a simulation: rows, versions and entries whose identity every part of them shows."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict

from tdserve.data.stored_entries import decode_entries
from tdserve.messages.content import make_rows_layout, read_layout, write_layout
from tdserve.messages.layout import Layout
from tdserve.messages.selection.selection import parse
from tdserve.rules.kv.keyed_settings import KeyedSettings
from tdserve.rules.replay.settings import Settings
from tdserve.structure.captures.capture import capture
from tdserve.structure.trees import codec
from tdserve.structure.trees.tree import Spec
from tdserve.v1 import control_pb2
from tdserve.values.value_columns import ValueColumn, encode_block

WIDTH = 3
"""Numbers of a row beside its identity."""

ROW = capture(TensorDict({"a": torch.tensor(0), "b": torch.zeros(WIDTH, dtype=torch.int64)}, [])).spec
"""The structure of a row, and of a version."""

ROW_MESSAGE = codec.encode(ROW)
EMPTY = capture(TensorDict({}, [])).spec
ALL = parse(slice(None)).to_message()


class FoundRow(NamedTuple):
    """A row of a table, as an answer has it."""

    identity: int
    row: int
    generation: int


def write_row(identity: int) -> list[int]:
    """Returns the other numbers of a row."""
    return [7 * identity + place for place in range(WIDTH)]


@cache
def _get_write_layout(num_rows: int, is_packed: bool) -> Layout:
    return write_layout(ROW.prepend((num_rows,)) if num_rows else ROW, is_packed=is_packed)


def encode_content(
    identities: list[int], fingerprint: bytes, *, is_packed: bool = False, is_single: bool = False
) -> control_pb2.Content:
    """Returns rows, or one version."""
    layout = _get_write_layout(0 if is_single else len(identities), is_packed)
    buffer = np.zeros(sum(layout.message_nbytes) // 8, np.int64)
    columns = {"a": identities, "b": [number for each in identities for number in write_row(each)]}
    for slot in layout.slots:
        buffer[slot.offset // 8 : (slot.offset + slot.nbytes) // 8] = columns[slot.path[-1]]
    return control_pb2.Content(fingerprint=fingerprint, inline=buffer.tobytes(), nbytes=buffer.nbytes)


def _read_columns(layout: Layout, inline: bytes) -> dict[str, Any]:
    return {
        slot.path[-1]: np.frombuffer(inline, np.int64, slot.nbytes // 8, slot.offset)
        for slot in layout.slots
        if slot.dtype == "int64"
    }


def read_identities(columns: dict[str, Any]) -> list[int]:
    """Returns the identities of rows. Raises AssertionError if one is torn."""
    identities: list[int] = columns["a"].tolist()
    expected = [number for each in identities for number in write_row(each)]
    # Rows that nobody has written are zeros.
    found = columns["b"].tolist()
    for row, identity in enumerate(identities):
        part = slice(row * WIDTH, (row + 1) * WIDTH)
        assert found[part] == (expected[part] if identity else [0] * WIDTH), f"row {identity} is torn: {found[part]}"
    return identities


def decode_rows_of_table(stored: Spec, done: control_pb2.Done, added: tuple[str, ...]) -> list[FoundRow]:
    """Returns the rows of an answer that were not overwritten meanwhile."""
    layout = make_rows_layout(stored, done.accepted.num_rows, added)
    columns = _read_columns(layout, done.inline)
    generations = columns["generation"].tolist()
    whole = [place for place, generation in enumerate(generations) if generation > 0 and generation % 2 == 0]
    kept = {"a": columns["a"][whole], "b": columns["b"].reshape(-1, WIDTH)[whole].reshape(-1)}
    rows = zip(
        read_identities(kept), columns["index"][whole].tolist(), columns["generation"][whole].tolist(), strict=True
    )
    return [FoundRow(*row) for row in rows]


def decode_tensordict(spec: Spec, done: control_pb2.Done, *, is_packed: bool = False) -> list[int]:
    """Returns the identities of the rows of a tensordict store, or the one of a version."""
    return read_identities(_read_columns(read_layout(spec, is_packed=is_packed), done.inline))


def encode_records(identities: list[int]) -> control_pb2.Content:
    """Returns the records of entries."""
    records = [np.array([each, *write_row(each)]).tobytes() for each in identities]
    return control_pb2.Content(values=encode_block([ValueColumn(True, records)]))


def decode_records(done: control_pb2.Done) -> list[tuple[int, int]]:
    """Returns identity and version of entries; identity 0 for one that is absent."""
    found = decode_entries(done.accepted.values)
    pairs = []
    for version, record in zip(found.versions, found.records, strict=True):
        numbers = np.frombuffer(record, np.int64).tolist()
        assert not numbers or numbers[1:] == write_row(numbers[0]), f"a record is torn: {numbers}"
        pairs.append((numbers[0] if numbers else 0, version))
    return pairs


def new_table(name: str, capacity: int, settings: Settings) -> control_pb2.CreateStoreRequest:
    """Returns the request for a table."""
    return control_pb2.CreateStoreRequest(
        name=name,
        kind=control_pb2.STORE_KIND_REPLAY,
        spec=ROW_MESSAGE,
        capacity=capacity,
        settings=settings.to_json(),
    )


def new_tensordict(name: str, num_rows: int) -> control_pb2.CreateStoreRequest:
    """Returns the request for a tensordict store."""
    spec = codec.encode(ROW.prepend((num_rows,)))
    return control_pb2.CreateStoreRequest(name=name, kind=control_pb2.STORE_KIND_TENSORDICT, spec=spec)


KEYED = KeyedSettings()


def new_keyed(name: str) -> control_pb2.CreateStoreRequest:
    """Returns the request for a keyed store."""
    return control_pb2.CreateStoreRequest(
        name=name, kind=control_pb2.STORE_KIND_KEYED, spec=codec.encode(EMPTY), settings=KEYED.to_json()
    )


KEYED_FINGERPRINT = KEYED.make_stored_spec(EMPTY.fingerprint).fingerprint


def decode_records_or_versions(done: control_pb2.Done) -> list[tuple[int, int]]:
    """Returns the versions of entries whose records were not asked for, each with 0."""
    return [(0, version) for version in decode_entries(done.accepted.values).versions]


@cache
def make_large(num_rows: int) -> Any:
    """Returns the structure of a tensordict store that is too large to lie in the catalog."""
    large = capture(TensorDict({"a": torch.zeros(9_000, dtype=torch.int64)}, [])).spec
    return codec.encode(large.prepend((num_rows,)))
