"""tdserve/server/observation.py: the sums over stores that are not listed one by one."""

from __future__ import annotations

from google.protobuf.descriptor import FieldDescriptor

from tdserve.server.observation import SUMMED
from tdserve.v1 import control_pb2

NO_COUNTS = {"version", "newest_policy_version", "structure", "min_size", "max_object_bytes", "fanout"}
"""Numbers and settings, whose sums say nothing."""

SHOWN_PER_STORE = {"num_discarded", "num_incomplete", "num_pinned", "num_damaged"}
"""Counts whose sum no metric and no page shows."""


def test_counts_of_a_store_when_a_new_one_is_added_then_it_is_summed_or_known_not_to_be() -> None:
    numbers = {FieldDescriptor.TYPE_UINT32, FieldDescriptor.TYPE_UINT64}
    fields = control_pb2.StoreDescription.DESCRIPTOR.fields
    repeated = {"damaged_rows"}
    found = {field.name for field in fields if field.type in numbers} - repeated
    assert found == {*SUMMED} | NO_COUNTS | SHOWN_PER_STORE
    assert not {*SUMMED} & (NO_COUNTS | SHOWN_PER_STORE)
