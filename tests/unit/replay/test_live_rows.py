from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tdserve.errors import LocalProtocolError
from tdserve.replay.live_rows import LiveRows, Rows

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
        assert self.live.rows().tolist() == sorted(self.model)
        everything = np.arange(_CAPACITY)
        assert set(everything[self.live.contains(everything)].tolist()) == self.model
        if self.model:
            assert set(self.live.draw(np.random.default_rng(1), 50).tolist()) <= self.model


TestAgainstASet = _AgainstASet.TestCase


def test_draw_when_seeded_then_reproducible() -> None:
    live = LiveRows(100)
    live.add(np.arange(50))
    first, second = (live.draw(np.random.default_rng(7), 20) for _ in range(2))
    assert first.tolist() == second.tolist()
    assert first.dtype == np.int64


def test_repr_when_shown_then_says_how_full() -> None:
    live = LiveRows(5)
    live.add(_rows([4, 2]))
    assert repr(live) == "<LiveRows 2 of 5>"
