"""The channel over a wire without tags takes the exam of transports: over a gloo pair that is used in order, and over
the wire between GPUs, with threads in place of their streams."""

from __future__ import annotations

import pytest
import torch

from tdserve.transport.channel import Channel, Work
from tdserve.transport.control_channel import ENDLESS_S
from tdserve.transport.ordered import OrderedChannel
from tests.conformance.test_transport_gloo import gloo_pair
from tests.conformance.transport_suite import Connect, Ends, TransportSuite
from tests.unit.transport.kernels import joined_wires, make_staging


class _OnWire:
    def __init__(self, work: Work) -> None:
        self._work = work

    def finish(self) -> None:
        self._work.wait(ENDLESS_S)


class GlooWire:
    """What NCCL is: pieces meet in the order in which both ends start them."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def send(self, piece: torch.Tensor) -> _OnWire:
        return _OnWire(self._channel.send(piece, 1))

    def recv(self, piece: torch.Tensor, after: object) -> _OnWire:
        assert after == "posted"
        return _OnWire(self._channel.recv(piece, 1))

    def mark_post(self, buffer: torch.Tensor) -> object:
        return "posted"

    def close(self) -> None:
        self._channel.close()


def ordered_pair() -> Ends:
    pairs = [gloo_pair() for _ in range(3)]
    first, second = (
        OrderedChannel(
            pairs[0][end], pairs[1][end], GlooWire(pairs[2][end]), is_leader=end == 0, transport="test", peer="it"
        )
        for end in (0, 1)
    )
    return first, second


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
