from __future__ import annotations

import pytest

from tdserve.client.groups.movers import CHAIN_BYTES, plan_route


@pytest.mark.parametrize("nbytes", [0, CHAIN_BYTES - 1, CHAIN_BYTES, 1 << 30])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 16, 33])
def test_route_when_of_all_ranks_then_each_gets_it_once_from_its_parent(size: int, nbytes: int) -> None:
    for src in {0, size - 1, size // 2}:
        routes = [plan_route(rank, src, size, nbytes) for rank in range(size)]
        reached = [src]
        for rank in reached:  # grows
            for child in routes[rank].children:
                assert routes[child].parent == rank
                reached.append(child)
        assert routes[src].parent is None
        assert sorted(reached) == list(range(size))


def test_route_when_content_is_large_then_no_rank_sends_it_twice() -> None:
    assert all(len(plan_route(rank, 2, 9, CHAIN_BYTES).children) <= 1 for rank in range(9))


def test_route_when_content_is_small_then_few_steps_are_between_source_and_the_last() -> None:
    size = 64
    parents = [plan_route(rank, 5, size, 10).parent for rank in range(size)]

    def steps(rank: int) -> int:
        parent = parents[rank]
        return 0 if parent is None else 1 + steps(parent)

    assert max(steps(rank) for rank in range(size)) == 6
