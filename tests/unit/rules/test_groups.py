from __future__ import annotations

import pytest

from tdserve.base.errors import InvalidRequestError, NotSupportedError, WrongStateError
from tdserve.rules.group_rule import MAX_CLAIMED_EPOCH, MAX_WORLD_SIZE, Ask, Epoch, GroupRule


def form(*members: int) -> GroupRule:
    """A group whose first epoch has these members, in this order."""
    rule = GroupRule("g")
    for member in members:
        rule.ask(Ask(member, world_size=len(members)))
    assert rule.form() == Epoch(1, members)
    return rule


def test_form_when_not_all_have_asked_then_waits_and_gives_the_number_of_missing_ones() -> None:
    rule = GroupRule("g")
    assert rule.is_over
    rule.ask(Ask(7, world_size=2))
    assert rule.form() is None
    assert rule.describe_missing() == "1 of 2 members have asked"
    rule.ask(Ask(5, world_size=2))
    assert rule.form() == Epoch(1, (7, 5))
    assert rule.form() is None
    assert not rule.is_over


def test_form_when_ranks_are_asked_for_then_the_others_get_what_is_free_in_order_of_arrival() -> None:
    rule = GroupRule("g")
    for member, rank in ((1, None), (2, 0), (3, None), (4, 2)):
        rule.ask(Ask(member, world_size=4, rank=rank))
    assert rule.form() == Epoch(1, (2, 1, 4, 3))


def test_form_when_more_have_asked_than_are_wanted_then_the_last_waits_for_the_next_epoch() -> None:
    rule = GroupRule("g")
    for member in (1, 2, 3):
        rule.ask(Ask(member, world_size=2))
    assert rule.form() == Epoch(1, (1, 2))
    assert rule.form() is None
    for member in (2, 1):
        rule.ask(Ask(member, epoch=1))
    assert rule.form() == Epoch(2, (1, 2, 3))


@pytest.mark.parametrize(
    ("ask", "argument"),
    [
        (Ask(2, world_size=3, rank=1), "rank"),
        (Ask(2, world_size=4), "world_size"),
        (Ask(2, world_size=3, backend="nccl"), "backend"),
        (Ask(2, world_size=3, rank=3), "rank"),
        (Ask(2, world_size=100_000), "world_size"),
        (Ask(2, world_size=3, epoch=MAX_CLAIMED_EPOCH + 1), "epoch"),
        (Ask(2, world_size=3, epoch=1, last_rank=MAX_WORLD_SIZE), "last_rank"),
        (Ask(2, world_size=3, epoch=1, last_world_size=MAX_WORLD_SIZE + 1), "last_world_size"),
    ],
)
def test_ask_when_it_contradicts_another_or_itself_then_refused_and_nothing_changes(ask: Ask, argument: str) -> None:
    rule = GroupRule("g")
    rule.ask(Ask(1, world_size=3, rank=1))
    with pytest.raises(InvalidRequestError) as raised:
        rule.ask(ask)
    assert raised.value.argument == argument
    assert rule.describe_missing() == "1 of 3 members have asked"


def test_ask_when_the_server_has_given_a_larger_number_then_the_next_epoch_goes_on_from_it() -> None:
    rule = GroupRule("g")
    largest = Ask(1, world_size=2, epoch=MAX_CLAIMED_EPOCH)
    for ask in (largest, Ask(2, world_size=2, epoch=MAX_CLAIMED_EPOCH + 1, above=MAX_CLAIMED_EPOCH + 1)):
        rule.ask(ask)
    assert rule.form() == Epoch(MAX_CLAIMED_EPOCH + 2, (1, 2))


def test_ask_when_the_member_asks_already_then_wrong_state() -> None:
    rule = GroupRule("g")
    rule.ask(Ask(1, world_size=3))
    with pytest.raises(WrongStateError):
        rule.ask(Ask(1, world_size=3))


def test_withdraw_when_it_was_the_only_one_then_the_group_is_over() -> None:
    rule = GroupRule("g")
    rule.ask(Ask(1, world_size=2))
    rule.withdraw(1)
    assert rule.is_over
    rule.ask(Ask(2, world_size=5))  # another size is no contradiction any more
    assert rule.form() is None


def test_next_epoch_when_all_that_live_have_asked_then_ranks_keep_their_order_and_newcomers_come_behind() -> None:
    rule = form(10, 11, 12, 13)
    rule.ask(Ask(9, world_size=4, rank=0))
    rule.ask(Ask(13, epoch=1))
    rule.ask(Ask(10, epoch=1))
    assert rule.form() is None
    assert "rank 1, 2 of epoch 1 has not asked" in rule.describe_missing()
    rule.leave(11)
    assert rule.form() is None
    rule.ask(Ask(12, epoch=1))
    assert rule.form() == Epoch(2, (10, 12, 13, 9))


def test_next_epoch_when_the_last_silent_one_dies_then_formed() -> None:
    rule = form(1, 2, 3)
    rule.ask(Ask(1))
    rule.ask(Ask(2))
    rule.leave(3)
    assert rule.form() == Epoch(2, (1, 2))


def test_next_epoch_when_a_size_is_said_then_goes_on_without_one_that_lives_and_newcomers_wait() -> None:
    rule = form(1, 2, 3)
    rule.ask(Ask(8, world_size=3))
    rule.ask(Ask(3, world_size=2))
    assert rule.form() is None
    rule.ask(Ask(2, world_size=2))
    assert rule.form() == Epoch(2, (2, 3))
    assert not rule.is_living(1)
    rule.ask(Ask(1, epoch=1))  # it wakes up
    rule.ask(Ask(2))
    rule.ask(Ask(3))
    assert rule.form() == Epoch(3, (2, 3, 8, 1))


def test_next_epoch_when_the_size_needs_newcomers_then_waits_for_them_and_takes_no_more() -> None:
    rule = form(1, 2)
    rule.ask(Ask(1, world_size=3))
    rule.ask(Ask(2, world_size=3))
    assert rule.form() is None
    assert rule.describe_missing() == "all have asked, 3 members are wanted"
    rule.ask(Ask(3, world_size=2))
    rule.ask(Ask(4, world_size=2))
    assert rule.form() == Epoch(2, (1, 2, 3))


def test_ask_when_members_have_another_backend_then_refused_until_the_last_of_them_is_gone() -> None:
    rule = form(1, 2)
    for ask in (Ask(3, world_size=3, backend="nccl", device="m 0"), Ask(1, epoch=1, backend="nccl")):
        with pytest.raises(InvalidRequestError, match="the members of group 'g' have 'gloo'") as raised:
            rule.ask(ask)
        assert raised.value.argument == "backend"
    for member in (1, 2):
        rule.ask(Ask(member, epoch=1))
    assert rule.form() == Epoch(2, (1, 2))
    for member in (1, 2):
        rule.leave(member)
    rule.ask(Ask(3, world_size=1, backend="nccl", device="m 0"))
    assert rule.form() == Epoch(3, (3,))


def test_first_epoch_when_a_server_has_forgotten_the_last_then_formed_of_as_many_in_their_order_and_numbers_grow() -> (
    None
):
    rule = GroupRule("g")
    rule.ask(Ask(21, epoch=7, last_rank=1, last_world_size=2))
    assert rule.form() is None
    rule.ask(Ask(22, epoch=7, last_rank=0, last_world_size=2))
    assert rule.form() == Epoch(8, (22, 21))


def test_others_when_of_another_epoch_or_no_member_then_none() -> None:
    rule = form(1, 2, 3)
    assert rule.list_others(2, 1) == [1, 3]
    assert rule.get_rank(2) == 1
    assert rule.list_others(2, 0) == []
    assert rule.list_others(4, 1) == []
    rule.leave(3)
    assert rule.list_others(2, 1) == [1]
    rule.leave(1)
    rule.leave(2)
    assert rule.is_over
    assert "0 of 3 live" in repr(rule)


def test_form_when_two_share_a_gpu_then_not_supported_and_no_request_is_left() -> None:
    rule = GroupRule("g")
    for member, device in ((1, "host uuid-0"), (2, "host uuid-1"), (3, "host uuid-0")):
        rule.ask(Ask(member, world_size=3, backend="nccl", device=device))
    with pytest.raises(NotSupportedError, match="ranks 0 and 2 share the GPU host uuid-0; use backend='gloo'"):
        rule.form()
    assert rule.is_over
