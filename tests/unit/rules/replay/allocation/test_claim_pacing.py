from __future__ import annotations

import pytest

from tdserve.rules.replay.allocation.claim_pacing import FIRST_CLAIM_EXTENDS, MAX_PAUSE, ClaimPacing


def count_pause(pacing: ClaimPacing) -> int:
    """Returns the extends until it is time for a claim."""
    number = 1
    while not pacing.count_extend():
        number += 1
    return number


def test_count_extend_when_nothing_has_happened_then_due_after_a_few_and_until_there_is_a_claim() -> None:
    pacing = ClaimPacing()
    assert count_pause(pacing) == FIRST_CLAIM_EXTENDS
    assert pacing.count_extend()


def test_on_granted_when_the_claim_is_lost_then_the_pause_is_as_before() -> None:
    pacing = ClaimPacing()
    count_pause(pacing)
    pacing.on_granted()
    assert count_pause(pacing) == FIRST_CLAIM_EXTENDS


def test_on_refused_when_repeated_then_each_pause_but_the_first_is_longer() -> None:
    pacing = ClaimPacing()
    pauses = []
    for _ in range(3):
        pacing.on_refused()
        pauses.append(count_pause(pacing))
    assert pauses == [FIRST_CLAIM_EXTENDS * 2**number for number in range(3)]


def test_on_ended_when_claims_are_not_worth_it_then_pauses_grow_up_to_a_limit() -> None:
    pacing = ClaimPacing()
    pauses = []
    for _ in range(12):
        pacing.on_ended(was_worth_it=False, is_next_due=False)
        pauses.append(count_pause(pacing))
    assert pauses == [min(FIRST_CLAIM_EXTENDS * 2**number, MAX_PAUSE) for number in range(1, 13)]


@pytest.mark.parametrize(("is_next_due", "pause"), [(True, 1), (False, FIRST_CLAIM_EXTENDS)])
def test_on_ended_when_a_claim_was_worth_it_then_the_next_is_due_soon_and_pauses_are_short_again(
    is_next_due: bool, pause: int
) -> None:
    pacing = ClaimPacing()
    pacing.on_ended(was_worth_it=False, is_next_due=False)
    pacing.on_ended(was_worth_it=True, is_next_due=is_next_due)
    assert count_pause(pacing) == pause
    pacing.on_granted()
    assert count_pause(pacing) == FIRST_CLAIM_EXTENDS
