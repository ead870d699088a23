from __future__ import annotations

import os
from functools import partial
from threading import Barrier, Thread, get_ident

import pytest
import torch

from tdserve.client.local.sharing import MAX_THREADS, count_threads, share

TIMEOUT_S = 20.0
NUM_THREADS = 2


def test_share_when_there_are_many_pieces_then_each_is_made_once() -> None:
    made: list[int] = []
    share([partial(made.append, number) for number in range(1_000)], NUM_THREADS)
    assert sorted(made) == list(range(1_000))
    share([], NUM_THREADS)


def test_share_when_two_threads_may_then_another_one_helps() -> None:
    both, threads = Barrier(2), set()

    def piece() -> None:
        threads.add(get_ident())
        both.wait(TIMEOUT_S)

    share([piece, piece], NUM_THREADS)
    assert len(threads) == 2


def test_share_when_pieces_fail_then_raised_and_the_others_are_made() -> None:
    made: list[int] = []

    def fail() -> None:
        raise ValueError("no such row")

    with pytest.raises(ValueError, match="no such row"):
        share([fail, *(partial(made.append, number) for number in range(100)), fail], NUM_THREADS)
    assert len(made) == 100


def test_share_when_several_threads_do_then_each_gets_its_own() -> None:
    made: list[list[int]] = [[] for _ in range(4)]

    def caller(mine: list[int]) -> None:
        for _ in range(100):
            share([partial(mine.append, number) for number in range(10)], NUM_THREADS)

    threads = [Thread(target=caller, args=(mine,)) for mine in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert [len(mine) for mine in made] == [1_000] * 4


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_share_when_forked_then_the_child_has_helpers_of_its_own() -> None:
    share([int] * 10, NUM_THREADS)
    child = os.fork()
    if not child:
        made: list[int] = []
        share([partial(made.append, number) for number in range(100)], NUM_THREADS)
        os._exit(0 if len(made) == 100 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_count_threads_when_torch_may_use_one_then_one() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert count_threads() == 1
        torch.set_num_threads(64)
        assert 1 <= count_threads() <= MAX_THREADS
    finally:
        torch.set_num_threads(before)
