from __future__ import annotations

import numpy as np

from tdserve.client.tables.parts import join_requests
from tests.unit.client.tables.numbered import part


def test_fits_when_what_is_said_of_the_rows_differs_then_not_joined() -> None:
    assert part(1).fits(part(7))
    assert part(1, priorities=bytes(8)).fits(part(2, priorities=bytes(16)))
    assert not part(1, priorities=bytes(8)).fits(part(1))
    assert not part(1, policy_versions=bytes(8)).fits(part(1))
    assert not part(1, writer=3).fits(part(1))
    assert not part(1, keys=[{"parts": ["obs"]}]).fits(part(1))


def test_nbytes_when_a_part_has_values_then_they_count() -> None:
    assert part(3)._replace(values_nbytes=100).nbytes == part(3).nbytes + 100


def test_joined_when_parts_have_policy_versions_then_every_row_has_its_own() -> None:
    said = [np.array(versions, "<i8").tobytes() for versions in ([3], [1, 2])]
    whole = join_requests([part(2, policy_versions=each).request for each in said])
    assert whole.num_rows == 4
    assert np.frombuffer(whole.policy_versions, "<i8").tolist() == [3, 3, 1, 2]
