"""Whether samples of the tables of a campaign still have the distribution that they should, after all kills."""

from __future__ import annotations

import numpy as np

import tdserve
from tdserve.soak.check import Findings
from tdserve.soak.round_stores import TABLES, RoundStores, identify_rows
from tests import chi_square

NUM_CELLS = 50
SAMPLE_ROWS = 1024
NUM_SAMPLES = 60

RAISED = 5.0
"""Priority that some rows of a prioritized table get: all of these are drawn equally often."""


def check_distribution(stores: RoundStores, findings: Findings) -> None:
    """Draws from each table; records a fault for each whose counts do not fit."""
    for name in TABLES:
        table = stores.client.replay(stores.name(name))
        raised = _raise_priorities(table, name) if table.settings.uses_priority else set()
        rows = raised or identify_rows(name, table[:])
        weights = np.bincount([_choose_cell(identity) for identity in rows], minlength=NUM_CELLS)
        counts = np.zeros(NUM_CELLS, np.int64)
        for _ in range(NUM_SAMPLES):
            drawn = identify_rows(name, table.sample(SAMPLE_ROWS))
            cells = [_choose_cell(identity) for identity in drawn if not raised or identity in raised]
            counts += np.bincount(cells, minlength=NUM_CELLS)
        used = weights > 0
        found, limit = (
            chi_square.statistic(counts[used], weights[used] / weights.sum()),
            chi_square.limit(int(used.sum())),
        )
        findings.counts[f"draws from {name}"] = int(counts.sum())
        fault = f"draws from {name!r} do not fit its rows: chi-square {found:.0f}, at most {limit:.0f} expected"
        findings.expect(counts[~used].sum() == 0 and found < limit, fault)


def _raise_priorities(table: tdserve.ReplayHandle, name: str) -> set[tuple[int, int]]:
    raised = set[tuple[int, int]]()
    for _ in range(4):
        rows = table.sample(SAMPLE_ROWS)
        table.update_priority(rows, np.full(SAMPLE_ROWS, RAISED))
        raised.update(identify_rows(name, rows))
    return raised


def _choose_cell(identity: tuple[int, int]) -> int:
    writer, number = identity
    return (31 * writer + number) % NUM_CELLS
