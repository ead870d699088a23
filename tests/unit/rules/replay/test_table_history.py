"""Random histories of a table, compared with the simplest model that obeys the same rules, one row at a time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tdserve.base.errors import InvalidRequestError, SelectionError, WrongStateError
from tdserve.rules.replay.allocation.reservation import Reservation
from tdserve.rules.replay.eligibility.conditions import OWN, PLAIN, SampleConditions
from tdserve.rules.replay.plans import Arrival, SamplePlan
from tdserve.rules.replay.remover import HighestPriority, LowestPriority
from tdserve.rules.replay.row_indexes.row_order import to_place
from tdserve.rules.replay.samplers.order import Fifo, Lifo
from tdserve.rules.replay.samplers.prioritized import Prioritized
from tdserve.rules.replay.samplers.sampler import Uniform
from tdserve.rules.replay.samplers.without_replacement import WithoutReplacement
from tdserve.rules.replay.settings import Settings
from tdserve.rules.replay.table import Table
from tdserve.rules.replay.table_state import TableState
from tests.state_machines import make_tests
from tests.unit.rules.replay.tables import acknowledge, clear, delete, give_back

_CAPACITY = 9
_KEYS = (0, 1)
_CONDITIONS = (
    PLAIN,
    SampleConditions((0,)),
    SampleConditions((), "a"),
    SampleConditions(None, "b"),
    SampleConditions((1,), "a"),
)
_ANY = st.sampled_from(_CONDITIONS)
_SAMPLERS = (Uniform(), Prioritized(), Fifo(), HighestPriority(), WithoutReplacement())

_numbers = st.lists(st.integers(0, _CAPACITY - 1), min_size=1, max_size=_CAPACITY)
_written = st.sampled_from([None, (0,), (1,)])


@dataclass
class _Row:
    sequence: int
    priority: float
    keys: set[int]
    num_times: int = 0
    had: set[str] = field(default_factory=set)
    is_held: bool = False
    is_hidden: bool = False
    is_spent: bool = False


@dataclass(eq=False)
class _Sent:
    """A sample whose content is being sent."""

    plan: SamplePlan
    rows: list[tuple[int, _Row]]
    lease: tuple[int, str] | None


class _AgainstAModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.generations = np.zeros(_CAPACITY, np.int64)
        self.columns: dict[str, Any] = {}
        self.rng = np.random.default_rng(0)
        self.rows: dict[int, _Row] = {}
        self.ever: dict[int, int] = {}  # generations, counted here
        self.open: list[tuple[Reservation, Arrival]] = []
        self.under_way: list[_Sent] = []
        self.leases: dict[tuple[str, int], int] = {}
        self.left: set[int] = set()  # while somebody wrote to them
        self.owners = [1, 2]
        self.inserts = self.num_failed = 0
        self.samples = 0
        self.highest = 1.0

    @initialize(
        sampler=st.sampled_from(_SAMPLERS),
        remover=st.sampled_from([Fifo(), Lifo(), LowestPriority()]),
        max_times=st.sampled_from([0, 0, 1, 2]),
    )
    def begin(self, sampler: Any, remover: Any, max_times: int) -> None:
        self.settings = Settings(sampler=sampler, remover=remover, max_times_sampled=max_times)
        self.table = Table(
            TableState("r", _CAPACITY, self.generations, self.settings, make_column=self._column, num_keys=len(_KEYS))
        )

    def _column(self, name: str, dtype: Any, shape: tuple[int, ...]) -> Any:
        return self.columns.setdefault(name, np.zeros(shape, dtype))

    # ------------------------------------------------------------ what the model knows

    def _members(self, conditions: SampleConditions) -> set[int]:
        wanted = set(_KEYS if conditions.require is None else conditions.require)
        return {
            number
            for number, row in self.rows.items()
            if not (row.is_held or row.is_spent or conditions.consumer in row.had)
            and wanted <= row.keys
            and (conditions.consumer, number) not in self.leases
        }

    def _changeable(self) -> set[int]:
        """Returns the rows that are not leaving the table."""
        return {number for number, row in self.rows.items() if not row.is_spent}

    def _num_held(self) -> int:
        return sum(row.is_held for row in self.rows.values())

    def _num_reserved(self) -> int:
        return sum(len(reservation) for reservation, _ in self.open) + len(self.left)

    def _drop(self, numbers: list[int]) -> None:
        for number in numbers:
            if self.rows.pop(number).is_held:
                self.left.add(number)
            self.leases = {conditions: owner for conditions, owner in self.leases.items() if conditions[1] != number}

    def _known(self, consumer: str, owner: int) -> list[int]:
        """Returns the rows of a lease that were reported to its owner."""
        silent = {number for sent in self.under_way if sent.lease == (owner, consumer) for number, _ in sent.rows}
        held = [number for (each, number), by in self.leases.items() if (each, by) == (consumer, owner)]
        return [number for number in held if number not in silent]

    # ------------------------------------------------------------ writing

    @rule(num_rows=st.integers(1, _CAPACITY), keys=_written, priority=st.none() | st.integers(0, 5))
    def extend(self, num_rows: int, keys: tuple[int, ...] | None, priority: int | None) -> None:
        before = set(self.rows)
        by_age = [number for number, row in self.rows.items() if not row.is_held]
        reservation = self.table.arrivals.reserve(num_rows)
        if num_rows > _CAPACITY - self._num_held() - self._num_reserved():
            assert reservation is None
            return
        assert reservation is not None
        chosen = reservation.rows.tolist()
        taken = {number for other, _ in self.open for number in other.rows.tolist()}
        assert not (taken | self.left) & set(chosen), "a row was given to two writers"
        assert not any(self.rows[number].is_held for number in set(chosen) & before)
        gone = {number for number in before if self.generations[number] & 1 and not self.rows[number].is_held}
        assert len(gone) == max(0, num_rows - (_CAPACITY - len(before) - self._num_reserved())), "as few as possible go"
        if isinstance(self.settings.remover, LowestPriority) and gone:
            left = [self.rows[n].priority for n in by_age if n not in gone]
            assert max(self.rows[n].priority for n in gone) <= min(left, default=np.inf)
        assert not isinstance(self.settings.remover, Lifo) or gone == set(by_age[len(by_age) - len(gone) :])
        self._drop(sorted(gone))
        needs = self.settings.uses_priority and priority is not None
        priorities = np.full(num_rows, float(priority or 0)) if needs else None
        self.open.append((reservation, Arrival(priorities=priorities, keys=keys)))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        reservation, arrival = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        self.table.arrivals.arrive(reservation.rows, arrival)
        committed = self.table.arrivals.commit(reservation)
        assert committed.tolist() == self.generations[reservation.rows].tolist()
        assert not (committed & 1).any()
        if arrival.priorities is not None:
            self.highest = max(self.highest, float(arrival.priorities[0]))
        for number in reservation.rows.tolist():
            self.inserts += 1
            priority = self.highest if arrival.priorities is None else float(arrival.priorities[0])
            self.rows[number] = _Row(self.inserts + self.num_failed, priority, set(arrival.keys or _KEYS))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        reservation, arrival = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        if data.draw(st.booleans()):  # the record failed
            self.table.arrivals.arrive(reservation.rows, arrival)
            self.table.arrivals.take_back(reservation.rows, arrival)
            self.num_failed += len(reservation)
            if arrival.priorities is not None:
                self.highest = max(self.highest, float(arrival.priorities[0]))
        self.table.ring.abort(reservation)

    # ------------------------------------------------------------ reading

    @rule(conditions=_ANY, num_rows=st.integers(1, _CAPACITY), num_batches=st.integers(1, 3))
    def sample(self, conditions: SampleConditions, num_rows: int, num_batches: int) -> None:
        members = self._members(conditions)
        try:
            plan = self.table.samples.draw_sample(num_rows, num_batches, rng=self.rng, conditions=conditions)
        except InvalidRequestError:
            assert self.settings.sampler.kind == "without_replacement"
            assert num_rows > len(members)
            return
        if plan is None:
            most = self.settings.max_times_sampled
            num_left = sum(most - self.rows[number].num_times for number in members) if most else np.inf
            if self.settings.sampler.is_distinct:
                assert most or len(members) < num_rows
            else:
                assert not members or num_left < num_rows * num_batches
            return
        assert len(plan.rows) == num_rows * num_batches
        assert set(plan.rows.tolist()) <= members
        if self.settings.sampler.kind == "fifo":
            oldest = sorted(members, key=lambda number: self.rows[number].sequence)[:num_rows]
            assert plan.rows.tolist()[:num_rows] == oldest
        self._sent(plan, None)

    @rule(conditions=_ANY, num_rows=st.integers(1, 4), num_batches=st.integers(1, 2), place=st.integers(0, 1))
    def take(self, conditions: SampleConditions, num_rows: int, num_batches: int, place: int) -> None:
        members, owner = self._members(conditions), self.owners[place]
        if self.settings.max_times_sampled:
            with pytest.raises(InvalidRequestError):
                self.table.samples.draw_sample(num_rows, num_batches, rng=self.rng, conditions=conditions, owner=owner)
            return
        plan = self.table.samples.draw_sample(num_rows, num_batches, rng=self.rng, conditions=conditions, owner=owner)
        if num_rows * num_batches > len(members):
            assert plan is None
            return
        assert plan is not None
        chosen = plan.rows.tolist()
        assert len(set(chosen)) == len(chosen) == num_rows * num_batches
        assert set(chosen) <= members, "a row was handed out twice to one consumer"
        if self.settings.sampler.kind == "fifo":
            assert chosen == sorted(members, key=lambda number: self.rows[number].sequence)[: len(chosen)]
        self.leases.update({(conditions.consumer, number): owner for number in chosen})
        self._sent(plan, (owner, conditions.consumer))

    def _sent(self, plan: SamplePlan, lease: tuple[int, str] | None) -> None:
        most = self.settings.max_times_sampled
        for number in plan.rows.tolist():
            row = self.rows[number]
            row.num_times += 1
            row.is_spent = bool(most) and row.num_times >= most
            assert not most or row.num_times <= most, "a row was handed out too often"
        assert set(plan.spent.tolist()) == {number for number in plan.rows.tolist() if self.rows[number].is_spent}
        assert plan.generations.tolist() == self.generations[plan.rows].tolist()
        self.samples += len(plan.rows)
        self.under_way.append(_Sent(plan, [(number, self.rows[number]) for number in plan.rows.tolist()], lease))

    @precondition(lambda self: self.under_way)
    @rule(data=st.data(), succeeds=st.booleans())
    def end_of_sending(self, data: st.DataObject, succeeds: bool) -> None:
        sent = self.under_way.pop(data.draw(st.integers(0, len(self.under_way) - 1)))
        spent = set(sent.plan.spent.tolist())
        same = [number for number, row in sent.rows if self.rows.get(number) is row]
        if succeeds:
            assert self.table.samples.finish(sent.plan) is bool(spent)
            self._drop(sorted(set(same) & spent))
            return
        self.table.samples.undo(sent.plan)
        self.samples -= len(sent.rows)
        for number in same:
            row = self.rows[number]
            row.num_times -= 1
            if number in spent:
                row.is_spent = False
            if sent.lease is not None and self.leases.get((sent.lease[1], number)) == sent.lease[0]:
                del self.leases[sent.lease[1], number]

    # ------------------------------------------------------------ leases

    @rule(data=st.data(), place=st.integers(0, 1), consumer=st.sampled_from([OWN, "a", "b"]), acks=st.booleans())
    def answer_lease(self, data: st.DataObject, place: int, consumer: str, acks: bool) -> None:
        owner = self.owners[place]
        known = sorted(self._known(consumer, owner))
        if not known:
            return
        numbers = data.draw(st.lists(st.sampled_from(known), min_size=1))
        leased = np.array(numbers), (self.generations[numbers] & ~1).astype(np.uint32)  # drawn before a write
        if acks:
            assert acknowledge(self.table, owner, consumer, *leased) == len(set(numbers))
        else:
            give_back(self.table, owner, consumer, *leased)
        for number in set(numbers):
            del self.leases[consumer, number]
            if acks and consumer != OWN:
                self.rows[number].had.add(consumer)
        if acks and consumer == OWN:
            self._drop(sorted(set(numbers)))

    @rule(place=st.integers(0, 1), consumer=st.sampled_from([OWN, "a"]), numbers=_numbers, acks=st.booleans())
    def answer_for_others(self, place: int, consumer: str, numbers: list[int], acks: bool) -> None:
        owner = self.owners[place]
        if all(self.leases.get((consumer, number)) == owner for number in numbers):
            return
        if acks:
            with pytest.raises(WrongStateError):
                acknowledge(self.table, owner, consumer, np.array(numbers))
            return
        give_back(self.table, owner, consumer, np.array(numbers))
        for number in set(numbers):
            if self.leases.get((consumer, number)) == owner:
                del self.leases[consumer, number]

    @rule(place=st.integers(0, 1))
    def session_ends(self, place: int) -> None:
        owner = self.owners[place]
        held = [conditions for conditions, by in self.leases.items() if by == owner]
        assert bool(sum(self.table.selectors.release_in_pieces(owner))) is bool(held)
        for conditions in held:
            del self.leases[conditions]
        self.owners[place] = max(self.owners) + 1

    # ------------------------------------------------------------ changes

    @rule(numbers=_numbers)
    def delete(self, numbers: list[int]) -> None:
        if set(numbers) <= self._changeable():
            assert delete(self.table, np.array(numbers)) == len(set(numbers))
            self._drop(sorted(set(numbers)))
        else:
            with pytest.raises(SelectionError):
                delete(self.table, np.array(numbers))

    @rule()
    def clear(self) -> None:
        changeable = self._changeable()
        assert clear(self.table) == len(changeable)
        self._drop(sorted(changeable))
        assert self.table.counts.inserts == self.table.counts.samples == 0

    @rule(numbers=_numbers, priority=st.integers(0, 9), age=st.sampled_from([0, 2]))
    def update_priority(self, numbers: list[int], priority: int, age: int) -> None:
        if not self.settings.uses_priority:
            return
        rows, values = np.array(numbers), np.full(len(numbers), float(priority))
        skipped = self.table.update_priority(rows, values, (self.generations[rows] // 2 * 2 - age).astype(np.uint32))
        there = [n for n in numbers if n in self.rows and not self.rows[n].is_spent and not age]
        assert skipped == len(numbers) - len(there)
        for number in there:
            self.rows[number].priority = priority
            self.highest = max(self.highest, priority)

    @rule(numbers=_numbers, hides=st.booleans())
    def hold(self, numbers: list[int], hides: bool) -> None:
        chosen = sorted(number for number in set(numbers) & self._changeable() if not self.rows[number].is_held)
        self.table.state.hold(np.array(chosen, np.int64))
        self.table.ring.hide(np.array(chosen if hides else (), np.int64))
        for number in chosen:
            self.rows[number].is_held, self.rows[number].is_hidden = True, hides

    @rule(keys=st.sampled_from([(), (0,), (1,), (0, 1)]))
    def let_go(self, keys: tuple[int, ...]) -> None:
        self.table.state.show(np.array([n for n, row in self.rows.items() if row.is_hidden], np.int64), keys)
        self.table.state.let_go(np.array([*(n for n, row in self.rows.items() if row.is_held), *self.left], np.int64))
        self.left.clear()
        for row in self.rows.values():
            row.keys |= set(keys if row.is_hidden else ())
            row.is_held = row.is_hidden = False

    # ------------------------------------------------------------ restart

    @rule()
    def restart(self) -> None:
        held = np.array([number for number, row in self.rows.items() if row.is_held], np.int64)
        state = self.table.state.get_state()
        where: dict[str, Any] = {"make_column": self._column, "num_keys": len(_KEYS)}
        self.table = Table(TableState.restore("r", self.generations, self.settings, state, held=held, **where))
        assert self.table.state.get_state() == {**state, "cursor": self.table.ring.cursor}
        self.open.clear()
        self.left.clear()
        self.under_way.clear()
        self.leases.clear()
        for row in self.rows.values():  # it is unknown whether it was sent, so it may come once more
            row.is_held = row.is_hidden  # of others nothing was written
            row.num_times -= row.is_spent
            row.is_spent = False

    # ------------------------------------------------------------ always

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "table"):
            return
        table = self.table
        there = sorted(number for number, row in self.rows.items() if not row.is_hidden)
        assert set(table.state.list_live_rows().tolist()) == {n for n, row in self.rows.items() if not row.is_spent}
        assert np.flatnonzero((self.generations > 0) & (self.generations % 2 == 0)).tolist() == there
        assert len(table) == len(self.rows)
        info = table.info()
        assert (info["inserts"], info["samples"]) == (self.inserts, self.samples)
        assert (info["num_held"], info["num_reserved"]) == (self._num_held(), self._num_reserved())
        assert info["num_leased"] == len(self.leases)
        for conditions in _CONDITIONS:
            assert len(table.selectors.get(conditions)) == len(self._members(conditions)), conditions
        for number in there:
            row = self.rows[number]
            assert to_place(int(table.columns.sequence[number])) == row.sequence
            if self.settings.uses_priority:
                assert table.columns.priority[number] == row.priority
            if self.settings.counts_samples:
                assert table.columns.times_sampled[number] == row.num_times


TestAgainstAModel, TestAgainstAModelWithAllExamples = make_tests(_AgainstAModel, num_examples=60, num_steps=40)
