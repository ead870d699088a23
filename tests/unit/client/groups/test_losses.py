from __future__ import annotations

import pytest

from tdserve.client.groups.losses import Losses
from tdserve.v1 import control_pb2


def make_loss(rank: int, num_finished: int | None = None, *, has_left: bool = True) -> control_pb2.GroupLoss:
    """Returns the report of a member that is lost."""
    return control_pb2.GroupLoss(rank=rank, has_left=has_left, num_finished=num_finished)


def in_call(number: int, peer: int | None = None) -> Losses:
    """Returns the losses of a member in its collective call of this number, or in a call of two after it."""
    losses = Losses()
    for _ in range(number):
        losses.begin(None)
        losses.finish(is_well=True)
    if peer is None:
        losses.num_finished -= 1
        losses.num_begun -= 1
    losses.begin(peer)
    return losses


@pytest.mark.parametrize(("num_finished", "is_end"), [(0, True), (2, True), (3, False), (4, False)])
def test_take_when_in_a_call_of_all_then_it_ends_unless_the_leaver_has_finished_it(
    num_finished: int, is_end: bool
) -> None:
    losses = in_call(3)
    loss = make_loss(1, num_finished)
    assert losses.take(loss, ends_all=False) is is_end
    assert losses.find_cause(None) == (loss if is_end else None)
    assert losses.end == (loss if is_end else None)
    assert losses.is_any
    losses.finish(is_well=not is_end)
    assert losses.num_finished == (2 if is_end else 3)
    assert losses.find_loss(None) == loss  # the next collective call needs it
    assert losses.find_loss(2) == (loss if is_end else None)


def test_take_when_in_a_call_of_two_then_it_goes_on_and_calls_that_need_the_leaver_are_refused() -> None:
    losses = in_call(3, peer=2)
    loss = make_loss(1, 3)
    assert not losses.take(loss, ends_all=False)
    assert losses.find_cause(2) is None
    assert losses.find_cause(1) == loss
    losses.finish(is_well=True)
    assert losses.num_finished == 3
    assert losses.find_loss(2) is None
    assert losses.find_loss(1) == losses.find_loss(None) == loss


@pytest.mark.parametrize("number", [0, 3])
def test_take_when_nothing_is_under_way_then_only_calls_that_need_the_leaver_fail(number: int) -> None:
    losses = in_call(number, peer=2)
    losses.finish(is_well=False)
    assert losses.num_finished == losses.num_begun == number
    assert not losses.take(make_loss(1, 0), ends_all=False)
    assert losses.end is None
    assert losses.find_loss(None) == make_loss(1, 0)
    assert losses.find_loss(0) is None


def test_take_when_it_went_with_something_under_way_or_all_are_needed_then_everything_ends() -> None:
    for losses, loss, ends_all in [
        (in_call(1), make_loss(1, has_left=False), False),
        (in_call(1, peer=0), make_loss(1, has_left=False), False),
        (in_call(1, peer=0), make_loss(1, 1), True),
    ]:
        assert losses.take(loss, ends_all=ends_all)
        assert losses.end == losses.find_loss(0) == losses.find_loss(None) == losses.find_cause(0) == loss


def test_take_when_the_leaver_does_not_report_what_it_has_finished_then_the_call_goes_on() -> None:
    losses = in_call(1)
    assert not losses.take(make_loss(1), ends_all=False)
    assert losses.find_cause(None) is None


def test_cause_when_one_has_left_after_its_part_and_another_has_died_then_the_dead_one() -> None:
    losses = in_call(2)
    losses.take(make_loss(1, 2), ends_all=False)
    assert losses.find_cause(None) is None
    losses.take(make_loss(2, has_left=False), ends_all=False)
    assert losses.find_cause(None) == make_loss(2, has_left=False)
    losses.take(make_loss(3, has_left=False), ends_all=False)
    assert losses.end == make_loss(2, has_left=False)


def test_call_when_under_way_then_known() -> None:
    losses = Losses()
    assert not losses.is_in_call
    losses.begin(1)
    assert losses.is_in_call
    losses.finish(is_well=True)
    assert (losses.is_in_call, losses.num_begun, losses.num_finished) == (False, 0, 0)
