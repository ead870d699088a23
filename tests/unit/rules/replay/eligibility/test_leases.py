from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tdserve.base.errors import LocalProtocolError, WrongStateError
from tdserve.messages.row_numbers import Rows
from tdserve.rules.replay.eligibility.leases import MAX_REMEMBERED, Leases
from tests.memory import count_bytes
from tests.state_machines import make_tests

_CAPACITY = 12
_OWNERS = [1, 2, 3]
_CONSUMERS = ["", "trainer"]

_rows_st = st.lists(st.integers(0, _CAPACITY - 1), max_size=6)
_owner_st = st.sampled_from(_OWNERS)
_consumer_st = st.sampled_from(_CONSUMERS)


def _rows(rows: Iterable[int]) -> Rows:
    return np.array(list(rows), np.int64)


class _AgainstADict(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.leases = Leases()
        self.model: dict[tuple[str, int], int] = {}
        self.numbers: list[int] = []
        self.requests: dict[tuple[str, int], int] = {}
        self.ends: dict[tuple[int, int], float] = {}  # by owner and request
        self.now_s = 0.0

    @rule(owner=_owner_st, rows=_rows_st, consumer=_consumer_st)
    def grant(self, owner: int, rows: list[int], consumer: str) -> None:
        if any((consumer, row) in self.model for row in rows):
            with pytest.raises(LocalProtocolError):
                self.leases.grant(owner, _rows(rows), consumer)
        else:
            request = len(self.numbers) + 1  # other owners have the same numbers too
            self.numbers.append(self.leases.grant(owner, _rows(rows), consumer, request=request))
            self.model |= {(consumer, row): owner for row in rows}
            self.requests |= {(consumer, row): request for row in rows}

    @rule(owner=_owner_st, request=st.integers(1, 20))
    def release_request(self, owner: int, request: int) -> None:
        mine = {key for key, held in self.model.items() if held == owner and self.requests[key] == request}
        found = list(self.leases.release_in_pieces(owner, piece_rows=2, request=request))
        assert {(consumer, row) for consumer, rows in found for row in rows.tolist()} == mine
        self.model = {key: held for key, held in self.model.items() if key not in mine}

    @rule(owner=_owner_st, request=st.integers(1, 20), lease_s=st.integers(1, 5))
    def set_end(self, owner: int, request: int, lease_s: int) -> None:
        self.leases.set_end(owner, request, self.now_s + lease_s)
        if any(held == owner and self.requests[key] == request for key, held in self.model.items()):
            self.ends[owner, request] = self.now_s + lease_s

    @rule(owner=_owner_st, rows=_rows_st, consumer=_consumer_st, lease_s=st.integers(1, 5))
    def renew(self, owner: int, rows: list[int], consumer: str, lease_s: int) -> None:
        self.leases.renew(owner, _rows(rows), consumer, self.now_s + lease_s)
        for row in rows:
            if self.model.get((consumer, row)) == owner:
                self.ends[owner, self.requests[consumer, row]] = self.now_s + lease_s

    @rule(passed_s=st.integers(0, 4))
    def end(self, passed_s: int) -> None:
        self.now_s += passed_s
        over = {key for key, end_s in self._list_ends().items() if end_s <= self.now_s}
        mine = {key for key, owner in self.model.items() if (owner, self.requests[key]) in over}
        found = list(self.leases.release_over_in_pieces(self.now_s, piece_rows=2))
        assert {(consumer, row) for consumer, rows in found for row in rows.tolist()} == mine
        assert all(self.leases.was_over(*key) for key in over)
        self.model = {key: held for key, held in self.model.items() if key not in mine}

    def _list_ends(self) -> dict[tuple[int, int], float]:
        """Lists the ends of leases of which rows are held."""
        held = {(owner, self.requests[key]) for key, owner in self.model.items()}
        return {key: end_s for key, end_s in self.ends.items() if key in held}

    @rule(owner=_owner_st, rows=_rows_st, consumer=_consumer_st)
    def take(self, owner: int, rows: list[int], consumer: str) -> None:
        num_strange = sum(self.model.get((consumer, row)) != owner for row in set(rows))
        if num_strange:
            with pytest.raises(WrongStateError, match=f"{num_strange} of these {len(set(rows))} rows"):
                self.leases.take(owner, _rows(rows), consumer)
        else:
            assert self.leases.take(owner, _rows(rows), consumer).tolist() == sorted(set(rows))
            self.model = {key: held for key, held in self.model.items() if key[0] != consumer or key[1] not in rows}

    @rule(owner=_owner_st, consumer=_consumer_st)
    def take_all(self, owner: int, consumer: str) -> None:
        self.take(
            owner, [row for (whose, row), held in self.model.items() if (whose, held) == (consumer, owner)], consumer
        )

    @rule(owner=_owner_st)
    def release(self, owner: int) -> None:
        pieces = list(self.leases.release_in_pieces(owner, piece_rows=2))
        assert all(0 <= len(rows) <= 2 and sorted(rows) == rows.tolist() for _, rows in pieces)
        released = sorted((consumer, row) for consumer, rows in pieces for row in rows.tolist())
        assert released == sorted(key for key, held in self.model.items() if held == owner)
        self.model = {key: held for key, held in self.model.items() if held != owner}

    @rule(rows=_rows_st)
    def forget(self, rows: list[int]) -> None:
        self.leases.forget(_rows(rows))
        self.model = {key: held for key, held in self.model.items() if key[1] not in rows}

    @invariant()
    def is_the_same(self) -> None:
        rows = np.arange(_CAPACITY)
        assert self.leases.num_leased == len(self.model)
        assert set(np.flatnonzero(self.leases.is_leased(rows)).tolist()) == {row for _, row in self.model}
        for consumer in _CONSUMERS:
            held = {row: owner for (whose, row), owner in self.model.items() if whose == consumer}
            assert np.flatnonzero(self.leases.is_leased(rows, consumer)).tolist() == sorted(held)
            for owner in _OWNERS:
                mine = np.flatnonzero(self.leases.find_held(owner, rows, consumer)).tolist()
                assert mine == sorted(row for row, whose in held.items() if whose == owner)
        assert self.numbers == list(range(1, len(self.numbers) + 1))
        assert self.leases.next_end_s == min(self._list_ends().values(), default=math.inf)
        num_owners = len(set(self.model.values()))
        assert repr(self.leases) == f"<Leases of {len(self.model)} rows to {num_owners} owners>"


TestAgainstADict, TestAgainstADictWithAllExamples = make_tests(_AgainstADict)


def test_take_when_rows_are_of_another_owner_then_refused_and_all_stay_held() -> None:
    leases = Leases()
    leases.grant(1, _rows([4, 5]), "")
    leases.grant(2, _rows([6]), "")
    with pytest.raises(WrongStateError, match="1 of these 2 rows are not held by this owner"):
        leases.take(1, _rows([5, 6]), "")
    assert leases.num_leased == 3


def test_take_when_done_twice_then_the_second_is_refused() -> None:
    leases = Leases()
    leases.grant(1, _rows([4, 5]), "a")
    assert leases.take(1, _rows([5, 4, 4]), "a").tolist() == [4, 5]
    with pytest.raises(WrongStateError):
        leases.take(1, _rows([4]), "a")


def test_take_when_the_row_was_handed_out_anew_meanwhile_then_its_old_owner_is_refused() -> None:
    leases = Leases()
    leases.grant(1, _rows([4]), "")
    leases.forget(_rows([4]))
    leases.grant(2, _rows([4]), "")
    with pytest.raises(WrongStateError):
        leases.take(1, _rows([4]), "")
    assert leases.find_held(2, _rows([4]), "").all()


def test_finding_when_a_row_is_held_again_by_a_later_request_then_not_for_the_earlier_one() -> None:
    leases = Leases(capacity=100)
    leases.grant(1, _rows([4, 5]), "", request=7)
    assert leases.find_held(1, _rows([4, 5]), "", request=7).all()
    assert leases.take(1, _rows([4]), "").tolist() == [4]
    leases.grant(1, _rows([4]), "", request=9)
    assert leases.find_held(1, _rows([4, 5]), "", request=7).tolist() == [False, True]
    assert leases.find_held(1, _rows([4, 5]), "", request=9).tolist() == [True, False]
    assert leases.find_held(1, _rows([4, 5]), "").all()
    assert not leases.find_held(1, _rows([4, 3]), "", request=8).any()


def test_holds_when_rows_are_beyond_all_that_was_held_then_false() -> None:
    leases = Leases()
    leases.grant(1, _rows([2]), "")
    assert leases.is_leased(_rows([2, 1000])).tolist() == [True, False]
    assert leases.find_held(1, _rows([10_000, 2]), "").tolist() == [False, True]
    assert leases.is_leased(_rows([]), "").tolist() == []


def test_repr_when_shown_then_has_the_counts() -> None:
    leases = Leases()
    leases.grant(1, _rows([2, 3]), "")
    assert repr(leases) == "<Leases of 2 rows to 1 owners>"


def test_releasing_when_others_come_in_between_then_each_row_goes_back_once() -> None:
    leases = Leases()
    leases.grant(1, _rows([0, 1, 2, 3]), "")
    leases.grant(1, _rows([4, 5]), "a")
    leases.grant(1, _rows([6]), "b")
    pieces = leases.release_in_pieces(1, piece_rows=2)
    consumer, rows = next(pieces)
    assert (consumer, rows.tolist()) == ("", [0, 1])
    leases.grant(2, _rows([0]), "")  # a row that is back may be handed out at once
    leases.forget(_rows([2, 6]))
    assert [(consumer, rows.tolist()) for consumer, rows in pieces] == [("", [3]), ("a", [4, 5])]
    assert leases.num_leased == 1
    assert leases.find_held(2, _rows([0]), "").all()


def test_releasing_when_leases_have_ended_then_their_requests_release_nothing() -> None:
    leases = Leases()
    for request in range(1, 4):
        leases.grant(1, _rows([request]), "", request=request)
    leases.grant(1, _rows([9]), "")
    leases.take(1, _rows([1]), "")
    leases.forget(_rows([2]))
    assert [
        *leases.release_in_pieces(1, piece_rows=9, request=1),
        *leases.release_in_pieces(1, piece_rows=9, request=2),
    ] == []
    ((_, rows),) = leases.release_in_pieces(1, piece_rows=9, request=3)
    assert rows.tolist() == [3]
    ((_, rows),) = leases.release_in_pieces(1, piece_rows=9)
    assert rows.tolist() == [9]


def test_leases_when_very_many_have_ended_then_nothing_is_kept_of_them() -> None:
    leases, sizes = Leases(8), []
    for request in range(1, 2000):
        rows = _rows([request % 8])
        leases.grant(1 + request % 5, rows, "", request=request)
        if request % 3 == 0:
            leases.take(1 + request % 5, rows, "")
        elif request % 3 == 1:
            leases.forget(rows)
        else:
            assert len(list(leases.release_in_pieces(1 + request % 5, piece_rows=9, request=request))) == 1
        sizes.append(count_bytes(leases))
    assert max(sizes) < 2 * sizes[10]


def test_grant_when_a_request_gets_rows_in_parts_then_they_are_one_lease() -> None:
    leases = Leases()
    numbers = {leases.grant(1, _rows([row, row + 1]), "", request=7) for row in (8, 0, 4)}
    assert numbers == {1}
    assert leases.take(1, _rows([8, 0]), "").tolist() == [0, 8]
    released = [rows.tolist() for _, rows in leases.release_in_pieces(1, piece_rows=2, request=7)]
    assert released == [[9], [1], [4, 5]]
    assert leases.num_leased == 0
    assert leases.grant(1, _rows([8]), "", request=7) == 2


def test_was_over_when_very_many_leases_have_ended_then_the_last_are_remembered() -> None:
    leases = Leases()
    for request in range(1, MAX_REMEMBERED + 3):
        leases.grant(1, _rows([4]), "", request=request)
        leases.set_end(1, request, 5.0)
        assert [rows.tolist() for _, rows in leases.release_over_in_pieces(5.0, piece_rows=9)] == [[4]]
    assert not leases.was_over(1, 2)
    assert leases.was_over(1, 3)
    assert leases.was_over(1, MAX_REMEMBERED + 2)
