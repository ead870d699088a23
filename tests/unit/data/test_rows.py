"""Selected rows of a mapped store are copied, and marked if they were overwritten meanwhile."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch

from tdserve.client.content.received import Received, make_views
from tdserve.data.mapped_stores import MappedStore, OpenStores
from tdserve.data.rows_source import make_rows_source
from tdserve.messages.content import GENERATION_KEY, INDEX_KEY, make_rows_layout
from tdserve.messages.layout import Layout
from tdserve.rules.replay.allocation.shared_numbers import FoundRows
from tdserve.transport.sources_sinks import RowBuffers
from tests.unit.worker.peer import StoredTensorDict


@pytest.fixture
def opened(plain: StoredTensorDict) -> MappedStore:
    """Six rows of generation 2, mapped."""
    stores = OpenStores(writes_values=False)
    stores.learn(plain.ref.fingerprint, plain.ref.spec)
    return stores.get(plain.ref)


def source_of(
    store: MappedStore, rows: list[int], expected: list[int], added: Mapping[str, bytes] | None = None
) -> tuple[Layout, RowBuffers]:
    """Returns a source of rows that control chose when they had these generations."""
    layout = make_rows_layout(store.spec, len(rows), tuple(added or {}))
    numbers, generations = np.array(rows, np.int64), np.array(expected, np.int64)
    return layout, make_rows_source(store, layout, FoundRows(numbers, generations), added or {})


def receive(layout: Layout, source: RowBuffers) -> Received:
    """Returns what a receiver gets from a source."""
    buffer = torch.zeros(layout.nbytes, dtype=torch.uint8)
    for message in layout.messages:
        source.fill(message, buffer[message.offset : message.offset + message.nbytes])
    return Received(layout, make_views(layout, buffer))


def test_rows_when_none_has_moved_then_all_with_numbers_and_what_the_table_adds(opened: MappedStore) -> None:
    priority = np.array([0.5, 1.5, 2.5], np.float32)
    received = receive(*source_of(opened, [5, 0, 5], [2, 2, 2], {"priority": priority.tobytes()}))
    assert received.get_leaves()["small",].tolist() == [5, 0, 5]
    assert received.get_trailing(INDEX_KEY).tolist() == [5, 0, 5]
    assert received.get_trailing(GENERATION_KEY).tolist() == [2, 2, 2]
    assert received.get_trailing("priority").tolist() == [0.5, 1.5, 2.5]
    assert received.num_torn == 0


@pytest.mark.parametrize(("expected", "now"), [(2, 4), (2, 3), (3, 3), (2, 0)])
def test_rows_when_one_has_moved_or_is_being_written_then_marked(
    opened: MappedStore, plain: StoredTensorDict, expected: int, now: int
) -> None:
    plain.generations.values[3] = now
    received = receive(*source_of(opened, [2, 3, 4], [2, expected, 2]))
    assert received.get_trailing(GENERATION_KEY).tolist() == [2, -expected, 2]
    assert received.num_torn == 1


def test_rows_when_one_moves_after_its_first_bytes_were_copied_then_marked_all_the_same(
    store: StoredTensorDict,
) -> None:
    stores = OpenStores(writes_values=False)
    stores.learn(store.ref.fingerprint, store.ref.spec)
    layout, source = source_of(stores.get(store.ref), [1, 2, 4], [2, 2, 2])
    assert len(layout.messages) > 1
    buffer = torch.zeros(layout.nbytes, dtype=torch.uint8)
    for number, message in enumerate(layout.messages):
        source.fill(message, buffer[message.offset : message.offset + message.nbytes])
        if number == 0:
            store.generations.values[2] += 1
    received = Received(layout, make_views(layout, buffer))
    assert received.get_trailing(GENERATION_KEY).tolist() == [2, -2, 2]
    assert received.num_torn == 1


def test_rows_when_there_are_none_then_nothing_is_missing(opened: MappedStore) -> None:
    received = receive(*source_of(opened, [], []))
    assert received.get_leaves()["small",].shape == (0,)
    assert received.num_torn == 0
