from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tdserve.base.errors import PeerLostError
from tdserve.bench.child import Child
from tdserve.bench.floor_link import REQUEST_NBYTES, Exchange, FloorLink, answer_exchanges
from tdserve.transport.gloo import CLIENT_RANK
from tests.gloo_secret import SECRET


@pytest.fixture(scope="module")
def link() -> Iterator[FloorLink]:
    with closing(FloorLink()) as link:
        yield link


@pytest.mark.parametrize(("nbytes_out", "nbytes_in"), [(64, 64), (100_000, 0), (0, 100_000), (70, 5_000), (5_000, 70)])
def test_exchange_when_of_any_direction_then_times_every_operation(
    link: FloorLink, nbytes_out: int, nbytes_in: int
) -> None:
    done = link.exchange(nbytes_out, nbytes_in, num_ops=5)
    assert len(done.op_s) == 5
    assert 0 < sum(done.op_s) <= done.elapsed_s


def test_exchange_when_cut_into_messages_with_a_rest_then_both_ends_agree(link: FloorLink) -> None:
    assert len(link.exchange(64, 10_000, num_ops=3, message_nbytes=4_096).op_s) == 3
    assert len(link.exchange(64, 64, num_ops=2).op_s) == 2


def test_exchange_when_the_peer_was_killed_then_peer_lost_and_close_leaves_no_process() -> None:
    with closing(FloorLink()) as link:
        link.exchange(64, 64, num_ops=1)
        os.kill(link.pid, signal.SIGKILL)
        with pytest.raises(PeerLostError):
            link.exchange(64, 64, num_ops=1_000_000)
    assert not Path(f"/proc/{link.pid}").exists()


def test_peer_when_ordered_then_answers_every_operation_and_reports_when_it_has_everything() -> None:
    with closing(Child(answer_exchanges)) as child:
        child.ask(SECRET)
        exchange = Exchange(child, CLIENT_RANK, SECRET)
        child.ask((0, REQUEST_NBYTES, 2, 1_000))
        for _ in range(3):  # two operations, then the end
            exchange.recv(REQUEST_NBYTES)
        exchange.channel.close()
