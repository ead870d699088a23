from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest

from tdserve.transport.channel import Channel, Work
from tdserve.transport.gloo import GlooChannel, _GlooWork
from tdserve.transport.loopback import LoopbackChannel, _LoopbackWork


@pytest.mark.parametrize("method", ["send", "recv", "close"])
@pytest.mark.parametrize("channel", [GlooChannel, LoopbackChannel])
def test_channel_when_implemented_then_takes_what_the_contract_says(channel: type, method: str) -> None:
    # What the methods do is examined by tests/conformance; here only that they can be called alike.
    expected = inspect.signature(getattr(Channel, method)).parameters
    assert list(inspect.signature(getattr(channel, method)).parameters) == list(expected)


@pytest.mark.parametrize("wait", [_GlooWork.wait, _LoopbackWork.wait])
def test_work_when_implemented_then_waits_as_the_contract_says(wait: Callable[..., None]) -> None:
    assert list(inspect.signature(wait).parameters) == list(inspect.signature(Work.wait).parameters)


def test_transport_when_named_then_distinct() -> None:
    assert [GlooChannel.transport, LoopbackChannel.transport] == ["gloo", "loopback"]
