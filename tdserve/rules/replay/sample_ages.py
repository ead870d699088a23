"""How old the rows of a table's newest sample were: what is noted of arrivals and samples, and measured on demand."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tdserve.messages.content import POLICY_VERSION_KEY
from tdserve.messages.row_numbers import Rows
from tdserve.rules.replay.eligibility.conditions import PLAIN
from tdserve.rules.replay.eligibility.staleness import UNKNOWN
from tdserve.rules.replay.plans import SamplePlan
from tdserve.rules.replay.row_ages import DrawnRows, SampleAge
from tdserve.rules.replay.row_indexes.row_order import to_place
from tdserve.rules.replay.table_state import TableState

_PROBED_ROWS = 256
"""Rows that stand for those that readers have drawn by themselves."""


def note_arrival(state: TableState, num_rows: int, now_s: float) -> None:
    """Notes that the rows which have arrived last have done so now, as in ``RowAges.note_rows``."""
    state.ages.note_rows(to_place(state.order.last_sequence) - num_rows + 1, now_s)


def note_sample(state: TableState, plan: SamplePlan, now_s: float) -> None:
    """Notes that a sample was drawn now."""
    staleness = state.selectors.staleness
    versions, lags = plan.columns.get(POLICY_VERSION_KEY), None
    if staleness is not None and versions is not None:
        lags = np.where(versions < 0, UNKNOWN, staleness.compute_lags(versions))
    _note_drawn(state, plan.sequence, now_s, lags)


def measure_sample_age(state: TableState, now_s: float, *, rng: np.random.Generator) -> SampleAge | None:
    """Returns the ages of the rows of the newest sample; None if there was none.

    Which rows readers have drawn by themselves is not known, but each live row was equally likely: if they have
    drawn any since the last call, others are drawn in their place.
    """
    num_drawn = state.shared.num_drawn
    if num_drawn != state.ages.num_drawn:
        state.ages.num_drawn = num_drawn
        selector = state.selectors.get(PLAIN)
        drawn = selector.draw(_PROBED_ROWS, rng=rng) if state.settings.sampler.draws_any_row and selector else None
        if drawn is not None:
            _note_drawn(state, state.columns.sequence[drawn.rows], now_s)
    return state.ages.measure()


def _note_drawn(state: TableState, sequence: Rows, now_s: float, lags: NDArray[np.int64] | None = None) -> None:
    state.ages.note_sample(DrawnRows(now_s, to_place(sequence), to_place(state.order.last_sequence), lags))
