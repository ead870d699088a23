from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, TensorDict

from tdserve.base.errors import (
    CapacityError,
    DeadlineExceededError,
    InvalidRequestError,
    LocalProtocolError,
    RemoteProtocolError,
    SpecMismatchError,
)
from tdserve.messages.content import MAX_SAMPLE_ROWS, make_rows_layout
from tdserve.messages.row_numbers import decode_rows
from tdserve.messages.row_sets import RowSet
from tdserve.messages.selection.selection import parse
from tdserve.rules.replay.eligibility.conditions import PLAIN
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.recovery.lost_rows import Overwrite
from tdserve.v1 import control_pb2
from tdserve.values.value_columns import decode_block
from tests.errors import raises
from tests.unit.server.replaying import in_line, path
from tests.unit.server.world import Loop, World, columns_of, content_of, outside


def rows(start: int, num_rows: int = 3) -> TensorDict:
    """Rows whose content says which they are."""
    return TensorDict({"a": torch.arange(start, start + num_rows), "b": {"c": torch.ones(num_rows, 2)}}, [num_rows])


@pytest.fixture
def store(world: World, run: Loop) -> OpenedStore:
    """A ring of seven rows; three must be there to sample."""
    return run(world.create_replay("r", rows(0)[0], 7, min_size=3))


def ask(store: OpenedStore, td: TensorDict, **fields: Any) -> control_pb2.ExtendRequest:
    """A request to extend by these rows."""
    content = content_of(td, store.spec.fingerprint)
    return control_pb2.ExtendRequest(
        **{"store": store.name, "num_rows": len(td), "content": content, "timeout_s": 0.05, **fields}
    )


def extend(world: World, run: Loop, store: OpenedStore, td: TensorDict, request: int) -> list[int]:
    """Row numbers."""
    done = run(world.extends.extend(world.session(), request, ask(store, td)))
    return [int(number) for number in decode_rows(done.indices)]


def read(world: World, run: Loop, store: OpenedStore, index: Any = ()) -> control_pb2.Done:
    """The answer to a read of live rows."""
    fingerprint = store.spec.fingerprint
    asked = control_pb2.ReadRequest(store=store.name, selection=parse(index).to_message(), fingerprint=fingerprint)
    done = run(world.row_reads.read(world.session(), 1, asked))
    assert done is not None
    return done


def test_extend_when_lost_rows_cannot_be_taken_off_the_record_then_nothing_is_reserved_and_they_stay_lost(
    world: World, run: Loop, store: OpenedStore
) -> None:
    overwrite = Overwrite(store.record.uid, "x" * 512, 1, RowSet.from_rows(np.array([4, 5])), ())  # too long for a key
    store.lost.overwrites.append(overwrite)
    with pytest.raises(LocalProtocolError):
        extend(world, run, store, rows(10, 5), 1)
    assert store.get_table().ring.num_reserved == 0
    assert store.lost.overwrites == [overwrite]


def test_extend_when_committed_then_live_and_read_back(world: World, run: Loop, store: OpenedStore) -> None:
    assert extend(world, run, store, rows(10, 5), 1) == [0, 1, 2, 3, 4]
    assert extend(world, run, store, rows(20, 4), 2) == [5, 6, 0, 1]
    done = read(world, run, store)
    columns = columns_of(make_rows_layout(store.spec, 7), done.inline)
    assert columns["a"].tolist() == [22, 23, 12, 13, 14, 20, 21]
    assert columns["index"].tolist() == list(range(7))
    assert (columns["generation"] - columns["generation"][2]).tolist() == [2, 2, 0, 0, 0, 0, 0]


def test_extend_when_the_server_restarts_then_rows_and_counts_are_back(
    world: World, run: Loop, store: OpenedStore
) -> None:
    extend(world, run, store, rows(10, 5), 1)
    world.reopen()
    table = world.stores.get("r").get_table()
    assert (len(table), table.ring.inserts) == (5, 5)
    assert extend(world, run, world.stores.get("r"), rows(20, 3), 2) == [5, 6, 0]


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"content": control_pb2.Content(fingerprint=b"other")}, SpecMismatchError),
        ({"num_rows": 8}, CapacityError),
        ({"num_rows": 0}, InvalidRequestError),
        ({"num_rows": 2}, RemoteProtocolError),  # the content is that of three rows
    ],
)
def test_extend_when_refused_then_no_row_is_live_or_kept(
    world: World, run: Loop, store: OpenedStore, fields: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        run(world.extends.extend(world.session(), 1, ask(store, rows(0), **fields)))
    table = store.get_table()
    assert (len(table), table.ring.num_reserved) == (0, 0)
    assert extend(world, run, store, rows(0, 7), 2)


def test_extend_when_all_rows_are_being_written_then_waits_until_the_deadline(
    world: World, run: Loop, store: OpenedStore
) -> None:
    reservation = store.get_table().arrivals.reserve(7)
    with pytest.raises(DeadlineExceededError, match=r"room for 3 rows in 'r' \(7 are being written\)"):
        run(world.extends.extend(world.session(), 1, ask(store, rows(0))))
    assert reservation is not None
    store.get_table().ring.abort(reservation)
    assert extend(world, run, store, rows(0), 2)


def test_sample_when_there_are_enough_rows_then_live_ones(world: World, run: Loop, store: OpenedStore) -> None:
    extend(world, run, store, rows(10, 4), 1)
    sample = control_pb2.SampleRequest(store="r", num_rows=5, num_batches=4)
    done = run(world.samples.sample(world.session(), 1, sample))
    assert done is not None
    assert done.accepted.num_rows == 20
    columns = columns_of(make_rows_layout(store.spec, 20), done.inline)
    assert torch.equal(columns["a"], columns["index"] + 10)
    assert set(columns["index"].tolist()) <= {0, 1, 2, 3}
    assert store.get_table().counts.samples == 20


def test_sample_when_there_are_too_few_rows_then_the_error_has_the_numbers(
    world: World, run: Loop, store: OpenedStore
) -> None:
    extend(world, run, store, rows(10, 2), 1)
    sample = control_pb2.SampleRequest(store="r", num_rows=5, timeout_s=0.01)
    with pytest.raises(DeadlineExceededError, match=r"(?s)2.*3"):
        run(world.samples.sample(world.session(), 1, sample))


@pytest.mark.parametrize("sizes", [[1], [1, 2]])
def test_sample_when_other_content_is_waited_for_then_refused_and_not_counted(
    world: World, run: Loop, store: OpenedStore, sizes: list[int]
) -> None:
    extend(world, run, store, rows(10, 4), 1)
    sample = control_pb2.SampleRequest(store="r", num_rows=5, message_nbytes=sizes)
    with raises(SpecMismatchError, store="r"):
        run(world.samples.sample(world.session(), 1, sample))


def test_sample_when_of_absurdly_many_rows_then_refused(world: World, run: Loop, store: OpenedStore) -> None:
    extend(world, run, store, rows(10, 4), 1)
    sample = control_pb2.SampleRequest(store="r", num_rows=MAX_SAMPLE_ROWS // 2 + 1, num_batches=2)
    with pytest.raises(InvalidRequestError):
        run(world.samples.sample(world.session(), 1, sample))


def test_extend_when_rows_have_values_then_each_row_has_its_own(world: World, run: Loop) -> None:
    def row(number: int) -> TensorDict:
        return TensorDict({"a": torch.tensor(number), "v": NonTensorData(f"value {number}")}, [])

    store = run(world.create_replay("v", row(0), 7))
    batch: Any = torch.stack([row(1), row(2), row(3)])
    extend(world, run, store, batch, 1)
    done = read(world, run, store, [2, 0])
    (column,) = decode_block(done.accepted.values)
    assert [b"value 3" in column.values[0], b"value 1" in column.values[1]] == [True, True]


def test_extend_when_partial_then_the_other_leaves_read_as_zeros_also_where_older_rows_had_some(
    world: World, run: Loop, store: OpenedStore
) -> None:
    extend(world, run, store, rows(10, 7), 1)
    done = run(world.extends.extend(world.session(), 2, ask(store, rows(20, 2).select("a"), keys=[path("a")])))
    assert decode_rows(done.indices).tolist() == [0, 1]
    columns = columns_of(make_rows_layout(store.spec, 7), read(world, run, store).inline)
    assert columns["a"].tolist() == [20, 21, 12, 13, 14, 15, 16]
    assert columns["c"].sum(dim=1).tolist() == [0.0, 0.0, 2.0, 2.0, 2.0, 2.0, 2.0]
    world.reopen()
    again = world.stores.get("r")
    assert again.get_table().selectors.has_partial_rows
    assert len(again.get_table().selectors.get(PLAIN)) == 5
    extend(world, run, again, rows(30, 7), 3)
    assert len(again.get_table().selectors.get(PLAIN)) == 7


def test_extend_when_its_record_fails_then_nothing_is_live_and_the_rows_are_free(
    world: World, run: Loop, store: OpenedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    extend(world, run, store, rows(10, 2), 1)

    def full(*arguments: Any) -> None:
        raise CapacityError(what="the catalog", asked=1, free=0)

    with monkeypatch.context() as patched:
        patched.setattr(world.stores, "save_state", full)
        with pytest.raises(CapacityError):
            extend(world, run, store, rows(20), 2)
    table = store.get_table()
    assert (table.state.list_live_rows().tolist(), table.ring.num_reserved, table.ring.inserts) == ([0, 1], 0, 2)
    assert extend(world, run, store, rows(30), 3) == [2, 3, 4]
    assert read(world, run, store, [2]).inline


def test_extend_when_granted_and_given_up_in_that_moment_then_the_next_writer_goes_on(
    world: World, run: Loop, store: OpenedStore
) -> None:
    table = store.get_table()
    held = table.arrivals.reserve(7)
    assert held is not None

    async def scenario() -> control_pb2.Done:
        first, second = (
            asyncio.create_task(world.extends.extend(world.session(n), 1, ask(store, rows(10, 4), timeout_s=20.0)))
            for n in (1, 2)
        )
        await in_line(store, 2)
        table.ring.abort(held)
        store.waiters.wake()
        await outside(first.cancel)  # it is granted, and has not gone on yet
        return await asyncio.wait_for(second, 5.0)

    assert len(decode_rows(run(scenario()).indices)) == 4
    assert (len(table), table.ring.num_reserved) == (4, 0)
