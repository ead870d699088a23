"""Whether samples of the tables of a campaign still have the distribution that they should, after all kills."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from tensordict import TensorDictBase

import tdserve
from tdserve.soak.check import Findings
from tdserve.soak.round_stores import TABLES, RoundStores, identify_rows
from tests import chi_square

NUM_CELLS = 50
SAMPLE_ROWS = 1024
NUM_SAMPLES = 60

RAISED = 5.0
"""Priority of some rows; that of the others is 1."""


def check_distribution(stores: RoundStores, findings: Findings) -> None:
    """Draws from each table; records a fault for each whose counts do not fit."""
    for name in TABLES:
        table = stores.client.replay(stores.name(name))
        raised = _raise_priorities(table, name) if table.settings.uses_priority else set()
        alpha = getattr(table.settings.sampler, "alpha", 1.0)
        weights = np.zeros(2 * NUM_CELLS)
        for identity in identify_rows(name, table[:]):
            weights[_choose_cell(identity, raised)] += RAISED**alpha if identity in raised else 1.0
        counts = np.zeros(2 * NUM_CELLS, np.int64)
        for _ in range(NUM_SAMPLES):
            counts += _count_cells(name, table.sample(SAMPLE_ROWS), raised)
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


def _choose_cell(identity: tuple[int, int], raised: set[tuple[int, int]]) -> int:
    writer, number = identity
    return (31 * writer + number) % NUM_CELLS + (NUM_CELLS if identity in raised else 0)


def _count_cells(name: str, rows: TensorDictBase, raised: set[tuple[int, int]]) -> NDArray[np.int64]:
    cells = [_choose_cell(identity, raised) for identity in identify_rows(name, rows)]
    return np.bincount(cells, minlength=2 * NUM_CELLS)
