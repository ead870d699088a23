from __future__ import annotations

import numpy as np

from tdserve.client.tables.parts import join_requests
from tdserve.v1 import control_pb2
from tests.unit.client.tables.numbered import part


def column(*numbers: int) -> control_pb2.RowColumn:
    """One number per row."""
    return control_pb2.RowColumn(data=np.array(numbers, "<i8").tobytes())


def test_fits_when_what_is_said_of_the_rows_differs_then_not_joined() -> None:
    assert part(1).fits(part(7))
    assert part(1, priorities=column(1)).fits(part(2, priorities=column(2)))
    assert not part(1, priorities=column(1)).fits(part(1))
    assert not part(1, policy_versions=column(1)).fits(part(1))
    assert not part(1, writer=3).fits(part(1))
    assert not part(1, keys=[{"parts": ["obs"]}]).fits(part(1))


def test_nbytes_when_a_part_has_values_then_they_count() -> None:
    assert part(3)._replace(values_nbytes=100).nbytes == part(3).nbytes + 100


def test_joined_when_parts_have_policy_versions_then_every_row_has_its_own() -> None:
    said = [column(3), column(1, 2)]
    whole = join_requests([part(2, policy_versions=each).request for each in said])
    assert whole.num_rows == 4
    assert np.frombuffer(whole.policy_versions.data, "<i8").tolist() == [3, 3, 1, 2]
