from __future__ import annotations

import numpy as np

from tdserve.rules.replay.allocation.ring import Ring


def test_commit_when_a_row_is_filled_first_or_again_then_it_counts_from_the_first_generation() -> None:
    generations = np.zeros(2, np.int64)
    ring = Ring(2, generations, first_generation=1000)
    for expected in ([1000, 0], [1000, 1000], [1002, 1000]):
        reservation = ring.reserve(1)
        assert reservation is not None
        assert ring.compute_generations(reservation).tolist() == [expected[reservation.rows[0]]]
        ring.commit(reservation)
        assert generations.tolist() == expected
    given_up = ring.reserve(2)
    assert given_up is not None
    ring.abort(given_up)
    assert Ring.restore(2, generations, ring.get_state(), first_generation=1000).num_holes == 2
