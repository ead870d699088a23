"""Searches for the starts of slices of a new length, which a thread makes while rows come and go."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tdserve.rules.replay.samplers.slices import Slices
from tests.unit.rules.replay.slice_model import Model, row_numbers


@pytest.mark.slow
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.full) for seed in (2, 3))])
def test_search_when_a_thread_makes_it_while_rows_come_and_go_then_as_found_at_once(seed: int, strict: bool) -> None:
    rng = np.random.default_rng(seed)
    model = Model(4000)
    view = model.view(Slices(num_slices=2, strict_length=strict))
    ((_, members),) = model.selectors
    for writer in range(4):
        model.write(writer, (rng.random(1000) < 0.05).tolist())
    suspended: list[int] = []
    for length in (2, 3, 7, 30, 200):
        search = view.prepare(2 * length)
        assert search is not None
        with ThreadPoolExecutor(1) as pool:
            passing = pool.submit(search.search)
            for turn in range(40):
                if turn == 20:
                    passing.result()
                model.write(turn % 4, (rng.random(1 + turn % 3) < 0.05).tolist())
                model.remove(rng.choice(model.live, 2, replace=False).tolist())
                live = [row for row in model.live if row not in suspended]
                back = [row for row in suspended if row in model.live and row not in members]
                view.add(row_numbers(back))
                suspended = rng.choice(live, 9, replace=False).tolist()
                view.remove(row_numbers(suspended))
                members |= set(back)
                members -= set(suspended)
        for _ in search.finish_in_pieces():
            pass
        valid = model.slices(members, length, strict=strict)
        assert not view.is_unprepared(2 * length)
        assert view.list_starts(length).tolist() == sorted(rows[0] for rows in valid)
