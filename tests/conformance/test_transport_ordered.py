"""The channel over a wire without tags takes the exam of transports: over a gloo pair that is used in order, and over
the wire between GPUs, with threads in place of their streams."""

from __future__ import annotations

import pytest

from tdserve.transport.ordered import OrderedChannel
from tests.channel_pairs import Ends, gloo_pair, ordered_pair
from tests.conformance.transport_suite import Connect, TransportSuite
from tests.kernels import joined_wires, make_staging


class TestOrdered(TransportSuite):
    @pytest.fixture
    def connect(self) -> Connect:
        return ordered_pair


def staged_pair() -> Ends:
    pairs = [gloo_pair() for _ in range(2)]
    _, wires = joined_wires(make_staging())
    first, second = (
        OrderedChannel(pairs[0][end], pairs[1][end], wires[end], is_leader=end == 0, transport="test", peer="it")
        for end in (0, 1)
    )
    return first, second


class TestStaged(TransportSuite):
    @pytest.fixture
    def connect(self) -> Connect:
        return staged_pair
