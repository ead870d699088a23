"""A sampler of this test's own, added by the first two steps of ``tdserve/rules/replay/samplers/sampler.py``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

from tdserve.base.errors import NotSupportedError
from tdserve.messages.row_numbers import Rows
from tdserve.rules.replay import settings as replay_settings
from tdserve.rules.replay.row_indexes.columns import RowColumns
from tdserve.rules.replay.samplers.epochs import NumberOrder
from tdserve.rules.replay.samplers.sampler import Sampler, make_epoch_order
from tdserve.rules.replay.samplers.selector import Drawn, Selector
from tdserve.rules.replay.settings import Settings
from tests.unit.rules.replay.tables import delete, rng, table_of, write


@dataclass(frozen=True)
class Every(Sampler):
    """Every ``step``-th row number, from the lowest, with the row's priority."""

    step: int

    kind: ClassVar[str] = "every"
    uses_priority: ClassVar[bool] = True
    adds: ClassVar[tuple[str, ...]] = ("priority",)
    is_ordered: ClassVar[bool] = True

    def make_selector(self, columns: RowColumns, capacity: int) -> EverySelector:
        """See Sampler."""
        return EverySelector(self.step, columns)

    def make_epoch_order(self, num_rows: int, epoch: int) -> NumberOrder:
        """See Sampler."""
        return NumberOrder()


class EverySelector(Selector):
    """The selector of Every."""

    def __init__(self, step: int, columns: RowColumns) -> None:
        self._step = step
        self._columns = columns
        self._rows: set[int] = set()

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, rows: Rows) -> None:
        """Takes rows in."""
        self._rows.update(rows.tolist())

    def remove(self, rows: Rows) -> None:
        """Drops rows."""
        self._rows.difference_update(rows.tolist())

    def draw(self, num_rows: int, *, rng: np.random.Generator, num_drawn: int = 0, num_total: int = 0) -> Drawn | None:
        """The lowest of every ``step`` rows; None while there are too few."""
        rows = np.asarray(sorted(self._rows)[:: self._step][:num_rows], np.int64)
        return Drawn(rows, {"priority": self._columns.priority[rows]}) if len(rows) == num_rows else None


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registers the sampler."""
    monkeypatch.setitem(replay_settings.RULES["sampler"], Every.kind, Every)


def test_settings_when_of_a_new_sampler_then_they_come_back_from_their_text() -> None:
    settings = Settings(sampler=Every(step=2))
    assert Settings.from_json(settings.to_json()) == settings
    assert settings.uses_priority
    assert settings.list_added_columns() == ("priority",)


def test_settings_when_a_sampler_adds_an_unknown_key_then_not_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Every, "adds", ("priority", "height"))
    with pytest.raises(NotSupportedError, match="'height'"):
        Settings(sampler=Every(step=2))


def test_sample_when_by_a_new_sampler_then_drawn_by_it() -> None:
    table = table_of(8, sampler=Every(step=3))
    write(table, 7)
    assert table.samples.draw_sample(4, rng=rng()) is None
    plan = table.samples.draw_sample(3, rng=rng())
    assert plan is not None
    assert plan.rows.tolist() == [0, 3, 6]
    assert plan.columns["priority"].tolist() == [1.0] * 3
    delete(table, np.asarray([0]))
    plan = table.samples.draw_sample(2, rng=rng())
    assert plan is not None
    assert plan.rows.tolist() == [1, 4]


def test_epoch_when_ordered_by_a_new_sampler_then_in_its_order() -> None:
    assert make_epoch_order(Every(step=2), 10, epoch=0) == NumberOrder()
