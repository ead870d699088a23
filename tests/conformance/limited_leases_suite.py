"""The tests of leases that last for a limited time (``lease_s``) that the service must pass over every transport."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.base.errors import ClosedError, InvalidRequestError, WrongStateError
from tests.conformance.suite import Connect, Suite

WAIT_S = 60.0
SHORT_S = 0.05
LONG_S = 3600.0

SIZES = [3, 20_000]
"""Elements of a row: rows ride in messages, or go over the transport."""


def make_rows(num_rows: int, size: int = 3) -> TensorDict:
    """Returns rows that show their number."""
    number = torch.arange(num_rows)
    return TensorDict({"number": number, "wide": number[:, None].expand(-1, size).float().contiguous()}, [num_rows])


def get_numbers(rows: Any) -> list[int]:
    """Returns the numbers of rows; fails if one is not whole."""
    assert (rows["wide"] == rows["number"][:, None]).all()
    found: list[int] = rows["number"].tolist()
    return found


class LimitedLeasesSuite(Suite):
    """The requirements of limited leases. A subclass gives ``connect``."""

    @pytest.mark.parametrize("size", SIZES)
    def test_take_when_a_consumer_hangs_then_another_has_its_rows_and_only_that_one_acknowledges(
        self, connect: Connect, name: str, size: int
    ) -> None:
        with connect() as hanging, connect() as other:
            queue = hanging.create_queue(name, make_rows(1, size)[0], 8)
            queue.extend(make_rows(6, size))
            elsewhere = other.queue(name)
            held = queue.take(4, lease_s=SHORT_S)
            by_hand = queue.take(2, ack=False, lease_s=SHORT_S)
            assert get_numbers(held.rows) + get_numbers(by_hand) == [*range(6)]
            with elsewhere.take(6, timeout_s=WAIT_S) as rows:
                assert get_numbers(rows) == [*range(6)]
                with pytest.raises(WrongStateError, match="neither acknowledged nor renewed within its lease_s"):
                    held.ack()
                with pytest.raises(WrongStateError, match="their lease has ended"):
                    queue.ack(by_hand)
                with pytest.raises(WrongStateError, match="renewing"):
                    held.renew(LONG_S)
                held.give_back()  # of what it does not have
                assert queue.info()["num_leased"] == 6
            assert len(queue) == 0

    def test_take_when_the_same_client_has_the_rows_again_then_the_first_block_is_refused(
        self, client: tdserve.Client, name: str
    ) -> None:
        queue = client.create_queue(name, make_rows(1)[0], 8)
        queue.extend(make_rows(2))
        first = queue.take(2, lease_s=SHORT_S)
        with queue.take(2, timeout_s=WAIT_S) as rows:
            assert get_numbers(rows) == get_numbers(first.rows) == [0, 1]
            with pytest.raises(WrongStateError):
                first.ack()
        assert len(queue) == 0

    def test_renew_when_called_then_the_lease_ends_at_another_time(self, connect: Connect, name: str) -> None:
        with connect() as one, connect() as other:
            queue = one.create_queue(name, make_rows(1)[0], 8)
            queue.extend(make_rows(6))
            unlimited, limited = queue.take(2), queue.take(2, lease_s=LONG_S)
            by_hand = queue.take(2, ack=False, lease_s=LONG_S)
            with pytest.raises(InvalidRequestError, match="taken without it"):
                unlimited.renew()
            limited.renew()
            queue.renew(by_hand, LONG_S)
            assert queue.info()["num_leased"] == 6
            unlimited.renew(SHORT_S)
            limited.renew(SHORT_S)
            queue.renew(by_hand[:1], SHORT_S)  # and the other row of its call
            assert get_numbers(other.queue(name).take(6, ack=False, timeout_s=WAIT_S)) == [*range(6)]

    def test_batches_when_one_takes_too_long_then_its_rows_come_again(self, connect: Connect, name: str) -> None:
        with connect() as one, connect() as other:
            queue = one.create_queue(name, make_rows(1)[0], 8)
            queue.extend(make_rows(4))
            with queue.batches(2, lease_s=LONG_S, timeout_s=WAIT_S) as batches:
                assert get_numbers(next(batches)) == [0, 1]
                assert get_numbers(next(batches)) == [2, 3]  # and the first two are acknowledged
                batches.renew(SHORT_S)
                with other.queue(name).take(2, timeout_s=WAIT_S) as rows:
                    assert get_numbers(rows) == [2, 3]
                queue.extend(make_rows(2))
                with pytest.raises(WrongStateError):
                    next(batches)
                batches.renew()  # there is nothing to renew, which stops no thread that renews again and again
                assert get_numbers(next(batches)) == [0, 1]
            assert len(queue) == 0

    def test_batches_when_a_block_ends_too_late_then_refused_and_closed(self, connect: Connect, name: str) -> None:
        with connect() as one, connect() as other:
            queue = one.create_queue(name, make_rows(1)[0], 8)
            queue.extend(make_rows(2))
            batches = queue.batches(2, lease_s=LONG_S, timeout_s=WAIT_S)

            def work_too_long() -> None:
                with batches:
                    assert get_numbers(next(batches)) == [0, 1]
                    batches.renew(SHORT_S)
                    other.queue(name).take(2, ack=False, timeout_s=WAIT_S)

            with pytest.raises(WrongStateError):
                work_too_long()
            for call in (batches.__next__, batches.renew):
                with pytest.raises(ClosedError):
                    call()

    def test_take_when_a_consumer_has_a_name_then_its_lease_ends_for_it_alone(
        self, connect: Connect, name: str
    ) -> None:
        with connect() as one, connect() as other:
            table: Any = one.create_replay(name, make_rows(1)[0], 8, consumers=("judge", "trainer"))
            table.extend(make_rows(4))
            elsewhere: Any = other.replay(name)
            held = table.take(4, consumer="judge", lease_s=SHORT_S)
            with elsewhere.take(4, consumer="judge", timeout_s=WAIT_S) as rows:
                assert get_numbers(rows) == [0, 1, 2, 3]
                with pytest.raises(WrongStateError):
                    held.ack()
            batches = table.batches(4, consumer="trainer", lease_s=LONG_S)
            held_rows = next(batches)
            table.renew(held_rows, SHORT_S, consumer="trainer")
            with elsewhere.take(4, consumer="trainer", timeout_s=WAIT_S) as rows:
                assert get_numbers(rows) == [0, 1, 2, 3]
            assert len(table) == 0

    @pytest.mark.parametrize("lease_s", [0, -1.0, float("nan"), float("inf"), 10**400, True, "1"])
    def test_take_when_the_time_is_none_then_refused(self, client: tdserve.Client, name: str, lease_s: Any) -> None:
        queue = client.create_queue(name, make_rows(1)[0], 8)
        queue.extend(make_rows(2))
        for call in (queue.take, queue.batches):
            with pytest.raises(InvalidRequestError) as caught:
                call(1, lease_s=lease_s)
            assert caught.value.argument == "lease_s"
        with queue.take(2) as rows, pytest.raises(InvalidRequestError):
            queue.renew(rows, lease_s)
