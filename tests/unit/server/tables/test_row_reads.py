from __future__ import annotations

from tdserve.base.errors import SpecMismatchError
from tdserve.messages.content import make_rows_layout
from tdserve.messages.selection.selection import parse
from tdserve.v1 import control_pb2
from tests.errors import raises
from tests.unit.server.replaying import create, extend, rows
from tests.unit.server.world import Loop, World, columns_of


def test_read_when_rows_are_named_then_these_and_not_counted_as_sampled(world: World, run: Loop) -> None:
    store = create(world, run, max_times_sampled=1)
    extend(world, run, store, rows(10))
    asked = control_pb2.ReadRequest(store="r", selection=parse([2, 0]).to_message(), fingerprint=store.spec.fingerprint)
    done = run(world.row_reads.read(world.session(), 1, asked))
    assert done is not None
    assert columns_of(make_rows_layout(store.spec, 2), done.inline)["a"].tolist() == [12, 10]
    assert (len(store.get_table()), store.get_table().counts.samples) == (3, 0)


def test_read_when_of_another_structure_then_refused(world: World, run: Loop) -> None:
    create(world, run)
    with raises(SpecMismatchError, store="r"):
        run(world.row_reads.read(world.session(), 1, control_pb2.ReadRequest(store="r", fingerprint=b"older")))
