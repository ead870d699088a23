"""Errors of moves."""

from __future__ import annotations

from tdserve.base.errors import TDServeError, WrongStateError
from tdserve.client.cluster.moves.store_move import explain_left


def make_failures(num_stores: int) -> dict[str, TDServeError]:
    """A failure of each store."""
    return {
        f"store-{n}": WrongStateError(state=f"the disk of server {n} is full", event="a move")
        for n in range(num_stores)
    }


def test_left_when_one_store_could_not_move_then_its_own_error() -> None:
    failures = make_failures(1)
    assert str(explain_left(failures, 1)) == str(failures["store-0"])


def test_left_when_several_could_not_then_the_first_error_names_them_all() -> None:
    explained = str(explain_left(make_failures(3), 1))
    assert "the disk of server 0 is full" in explained
    assert "still on server 1: 'store-0', 'store-1', 'store-2'" in explained


def test_left_when_there_are_many_then_the_rest_is_a_number() -> None:
    assert "and 80 more" in str(explain_left(make_failures(100), 1))
