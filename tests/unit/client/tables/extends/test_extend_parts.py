from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from tdserve.base.deadline import Deadline
from tdserve.client.tables.extends.extend_parts import ExtendPart, WaitingParts, join_requests
from tdserve.client.transfers.coalescer import is_expired
from tdserve.v1 import control_pb2
from tests.unit.client.tables.numbered import part


def column(*numbers: int) -> control_pb2.RowColumn:
    """Returns a column with a number per row."""
    return control_pb2.RowColumn(data=np.array(numbers, "<i8").tobytes())


def test_fits_when_what_is_said_of_the_rows_differs_then_not_joined() -> None:
    assert part(1).is_compatible_with(part(7))
    assert part(1, priorities=column(1)).is_compatible_with(part(2, priorities=column(2)))
    assert not part(1, priorities=column(1)).is_compatible_with(part(1))
    assert not part(1, policy_versions=column(1)).is_compatible_with(part(1))
    assert not part(1, writer=3).is_compatible_with(part(1))
    assert not part(1, keys=[{"parts": ["obs"]}]).is_compatible_with(part(1))
    assert not part(1)._replace(deadline=Deadline.after(5.0)).is_compatible_with(part(1))


def test_nbytes_when_a_part_has_values_then_they_count() -> None:
    assert part(3)._replace(values_nbytes=100).nbytes == part(3).nbytes + 100


def test_joined_when_parts_have_policy_versions_then_every_row_has_its_own() -> None:
    said = [column(3), column(1, 2)]
    whole = join_requests([part(2, policy_versions=each).request for each in said])
    assert whole.num_rows == 4
    assert np.frombuffer(whole.policy_versions.data, "<i8").tolist() == [3, 3, 1, 2]


def num_rows(parts: Iterable[ExtendPart]) -> list[int]:
    """Returns the number of rows of each part."""
    return [each.request.num_rows for each in parts]


def waiting_parts(*parts: ExtendPart, max_rows: int = 100) -> WaitingParts:
    """Returns waiting parts, in this order."""
    made = WaitingParts(max_rows)
    for each in parts:
        made.append(each)
    return made


def test_take_when_there_are_too_many_rows_or_bytes_then_as_many_as_fit() -> None:
    waiting = waiting_parts(part(40), part(40), part(40), part(40))
    assert num_rows(waiting.take(1 << 20)) == [40, 40]
    assert waiting.nbytes == part(80).nbytes
    assert num_rows(waiting.take(part(79).nbytes)) == [40]
    assert num_rows(waiting.take(1)) == [40], "one at least"
    assert (len(waiting), waiting.nbytes) == (0, 0)


def test_put_back_when_parts_were_taken_then_they_are_first_in_their_order() -> None:
    waiting = waiting_parts(part(1), part(2), part(3), max_rows=3)
    waiting.put_back(waiting.take(1 << 20))
    assert num_rows(waiting) == [1, 2, 3]
    assert (waiting.first.request.num_rows, waiting.nbytes) == (1, part(6).nbytes)


def test_enough_when_batches_differ_in_size_then_about_as_much() -> None:
    under_way = part(8).nbytes
    assert [waiting_parts(part(num)).is_enough(under_way, 1 << 20) for num in (5, 6)] == [False, True]
    assert waiting_parts(part(1)).is_enough(under_way, part(1).nbytes), "no more than a request may have"
    assert waiting_parts(part(1)).is_enough(0, 1 << 20)
    assert waiting_parts(part(1), max_rows=1).is_enough(under_way, 1 << 20), "nothing is shared"


def test_take_out_when_the_time_of_some_is_over_then_these() -> None:
    waiting = waiting_parts(part(1), part(2)._replace(deadline=Deadline.after(0.0)), part(3))
    assert num_rows(waiting.take_out(is_expired)) == [2]
    assert (num_rows(waiting), waiting.nbytes) == ([1, 3], part(4).nbytes)
