from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from tdserve.base.errors import CorruptDataError, PeerLostError
from tdserve.bench.child import Child, Pipe, open_children


def double(pipe: Pipe, first: int) -> None:
    """Answers with the double of each order; refuses negative ones."""
    pipe.send(first)
    while (order := pipe.recv()) >= 0:
        pipe.send(2 * order)
    raise CorruptDataError(path="test", expected="0 or more", actual=str(order))


@pytest.mark.slow
def test_child_when_asked_then_answers_and_close_leaves_no_process() -> None:
    with closing(Child(double, 7)) as child:
        assert child.recv() == 7
        assert child.ask(3) == 6
    assert not Path(f"/proc/{child.pid}").exists()


def test_child_when_its_function_raises_then_that_error_is_the_answer_and_the_last_one() -> None:
    with closing(Child(double, 0)) as child:
        child.recv()
        with pytest.raises(CorruptDataError, match="-1"):
            child.ask(-1)
        with pytest.raises(PeerLostError, match="test_child"):
            child.recv()


def test_child_when_closed_then_neither_sends_nor_receives() -> None:
    child = Child(double, 0)
    child.close()
    for use in (child.recv, lambda: child.send(1)):
        with pytest.raises(PeerLostError):
            use()


@pytest.mark.slow
def test_children_when_work_with_them_fails_then_none_is_left() -> None:
    pids: list[int] = []

    def work() -> None:
        with open_children(2, double, 7) as children:
            pids.extend(child.pid for child in children)
            assert [child.recv() for child in children] == [7, 7]
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()
    assert len(set(pids)) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
