from __future__ import annotations

import inspect

import pytest

from tdserve.transport.channel import Channel
from tdserve.transport.gloo import GlooChannel
from tdserve.transport.loopback import LoopbackChannel


@pytest.mark.parametrize("method", ["send", "recv", "close"])
@pytest.mark.parametrize("channel", [GlooChannel, LoopbackChannel])
def test_channel_when_implemented_then_has_the_parameters_of_the_contract(channel: type, method: str) -> None:
    # What the methods do is examined by tests/conformance; here only that they can be called alike.
    expected = inspect.signature(getattr(Channel, method)).parameters
    assert list(inspect.signature(getattr(channel, method)).parameters) == list(expected)


def test_transport_when_named_then_distinct() -> None:
    assert [GlooChannel.transport, LoopbackChannel.transport] == ["gloo", "loopback"]
