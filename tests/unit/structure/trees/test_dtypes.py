from __future__ import annotations

from tdserve.structure.trees.dtypes import ITEMSIZE, NAMES, WIRE
from tdserve.v1 import spec_pb2


def test_table_when_compared_with_the_protocol_then_covers_every_number_once() -> None:
    assert sorted(WIRE.values()) == [number for number in spec_pb2.DType.values() if number]
    assert {NAMES[WIRE[name]] for name in ITEMSIZE} == set(ITEMSIZE)


def test_table_when_compared_with_the_enum_then_names_agree() -> None:
    assert {spec_pb2.DType.Name(number) for number in NAMES if number} == {f"DTYPE_{name.upper()}" for name in ITEMSIZE}
