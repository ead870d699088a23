from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tdserve.base.errors import PeerLostError
from tdserve.bench.grpc_link import GrpcLink


@pytest.fixture(scope="module")
def link() -> Iterator[GrpcLink]:
    with closing(GrpcLink()) as link:
        yield link


@pytest.mark.parametrize(("nbytes_out", "nbytes_back"), [(64, 64), (3_000_000, 0), (0, 3_000_000), (70, 5_000)])
def test_exchange_when_of_any_direction_then_times_every_operation(
    link: GrpcLink, nbytes_out: int, nbytes_back: int
) -> None:
    done = link.exchange(nbytes_out, nbytes_back, num_ops=5)
    assert len(done.op_s) == 5
    assert 0 < sum(done.op_s) <= done.elapsed_s


def test_exchange_when_the_peer_was_killed_then_peer_lost_and_close_leaves_no_process() -> None:
    with closing(GrpcLink()) as link:
        link.exchange(64, 64, num_ops=1)
        os.kill(link.pid, signal.SIGKILL)
        with pytest.raises(PeerLostError):
            link.exchange(64, 64, num_ops=1_000_000)
    assert not Path(f"/proc/{link.pid}").exists()
