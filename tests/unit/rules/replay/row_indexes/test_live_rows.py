from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tdserve.base.errors import LocalProtocolError
from tdserve.messages.row_numbers import Rows
from tdserve.rules.replay.row_indexes.live_rows import LiveRows, compact
from tests import chi_square
from tests.state_machines import make_tests

_CAPACITY = 24


def _rows(rows: Iterable[int]) -> Rows:
    return np.array(list(rows), np.int64)


class _AgainstASet(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.live = LiveRows(_CAPACITY)
        self.model: set[int] = set()

    @rule(data=st.data())
    def add(self, data: st.DataObject) -> None:
        absent = sorted(set(range(_CAPACITY)) - self.model)
        rows = data.draw(st.lists(st.sampled_from(absent), unique=True)) if absent else []
        self.live.add(_rows(rows))
        self.model |= set(rows)

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        rows = data.draw(st.lists(st.sampled_from(sorted(self.model)), unique=True)) if self.model else []
        self.live.remove(_rows(rows))
        self.model -= set(rows)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def add_wrongly(self, data: st.DataObject) -> None:
        with pytest.raises(LocalProtocolError):
            self.live.add(_rows([data.draw(st.sampled_from(sorted(self.model)))]))

    @precondition(lambda self: len(self.model) < _CAPACITY)
    @rule(data=st.data())
    def name_twice_or_wrongly(self, data: st.DataObject) -> None:
        absent = data.draw(st.sampled_from(sorted(set(range(_CAPACITY)) - self.model)))
        with pytest.raises(LocalProtocolError):
            self.live.add(_rows([absent, absent]))
        with pytest.raises(LocalProtocolError):
            self.live.remove(_rows([*sorted(self.model)[:2], absent]))

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def remove_twice_at_once(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.model)))
        with pytest.raises(LocalProtocolError):
            self.live.remove(_rows([row, row]))

    @invariant()
    def is_the_same_set(self) -> None:
        assert len(self.live) == len(self.model)
        assert self.live.get_rows().tolist() == sorted(self.model)
        everything = np.arange(_CAPACITY)
        assert set(everything[self.live.contains(everything)].tolist()) == self.model
        if self.model:
            assert set(self.live.draw(np.random.default_rng(1), 50).tolist()) <= self.model


TestAgainstASet, TestAgainstASetWithAllExamples = make_tests(_AgainstASet)


def test_draw_when_seeded_then_reproducible() -> None:
    live = LiveRows(100)
    live.add(np.arange(50))
    first, second = (live.draw(np.random.default_rng(7), 20) for _ in range(2))
    assert first.tolist() == second.tolist()
    assert first.dtype == np.int64


def test_repr_when_shown_then_has_size_and_capacity() -> None:
    live = LiveRows(5)
    live.add(_rows([4, 2]))
    assert repr(live) == "<LiveRows 2 of 5>"


@pytest.mark.parametrize("seed", range(12))
def test_live_when_long_runs_come_and_go_then_as_a_set(seed: int) -> None:
    rng, capacity = np.random.default_rng(seed), 6000
    live, model = LiveRows(capacity), set[int]()
    for _ in range(40):
        start = int(rng.integers(0, capacity - 1500))
        run = np.arange(start, start + int(rng.integers(400, 1500)))
        named = run if rng.random() < 0.7 else rng.permutation(run)[: len(run) // 2]
        before = live.select_members(named)
        assert before.tolist() == [row for row in named.tolist() if row in model]
        live.remove(before)
        model -= set(before.tolist())
        live.add(named)
        model |= set(named.tolist())
        if rng.random() < 0.5:
            live.remove(named)
            model -= set(named.tolist())
        assert live.get_rows().tolist() == sorted(model)
        with pytest.raises(LocalProtocolError):
            live.remove(run if not model >= set(run.tolist()) else np.append(run, run[:1]))
        assert len(live) == len(model)


def test_compact_when_rows_are_few_or_no_run_then_the_rows() -> None:
    run = np.arange(7, 2000)
    assert compact(run) == slice(7, 2000)
    for rows in (run[:100], run[::-1], run[::2], np.append(run[:-1], run[-2]), run[:0]):
        assert compact(rows) is rows
    swapped = run.copy()
    swapped[[3, 4]] = swapped[[4, 3]]
    assert compact(swapped) is swapped


@pytest.mark.slow
def test_draw_others_when_members_come_and_go_in_between_then_none_twice_and_each_as_likely() -> None:
    rng, counts = np.random.default_rng(0), np.zeros(12, np.int64)
    for _ in range(4000):
        live = LiveRows(12)
        live.add(np.arange(10))
        drawn = live.draw_others(rng, 3, num_drawn=0)
        live.remove(np.array([drawn[0], (drawn[0] + 1) % 10]))
        live.add(np.array([10, 11]))
        left = set(live.get_rows().tolist())
        drawn = np.append(drawn, live.draw_others(rng, 2, num_drawn=3))
        drawn = np.append(drawn, live.draw_others(rng, 2, num_drawn=5))
        assert len(set(drawn.tolist())) == 7
        assert set(live.get_rows().tolist()) == left
        counts += np.bincount(drawn[:3], minlength=12)
    assert chi_square.statistic(counts[:10]) < chi_square.limit(10)
