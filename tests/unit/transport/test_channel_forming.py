from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest
import torch

from tdserve.base.errors import ClosedError, ConnectError, PeerLostError
from tdserve.transport.channel import Channel
from tdserve.transport.channel_forming import Forming
from tdserve.transport.loopback import LoopbackChannel

TIMEOUT_S = 20.0
THREAD = "test-forming"


class Handshake:
    """A handshake that lasts until ``end``, or ``fail``."""

    def __init__(self) -> None:
        self.begun = Event()
        self.channel, self.other = LoopbackChannel.make_pair()
        self._ended = Event()
        self._error: ConnectError | None = None

    def __call__(self) -> Channel:
        self.begun.set()
        assert self._ended.wait(TIMEOUT_S)
        if self._error is not None:
            raise self._error
        return self.channel

    def end(self) -> None:
        """The channel is formed."""
        self._ended.set()

    def fail(self, error: ConnectError) -> None:
        """Ends the handshake without a channel."""
        self._error = error
        self._ended.set()

    def is_closed(self) -> bool:
        """Whether the channel was closed."""
        try:
            self.other.send(torch.zeros(1, dtype=torch.uint8), 0)
        except PeerLostError:
            return True
        return False


@pytest.fixture
def handshake() -> Iterator[Handshake]:
    """A handshake that is under way."""
    made = Handshake()
    yield made
    made.end()


def join() -> None:
    """Waits until the forming threads are over."""
    for thread in threading.enumerate():
        if thread.name == THREAD:
            thread.join(TIMEOUT_S)
            assert not thread.is_alive()


def forming(handshake: Handshake, on_formed: Callable[[Channel], None] | None = None) -> Forming:
    """The channel of this handshake."""
    return Forming(handshake, peer="the other end", name=THREAD, on_formed=on_formed)


def test_wait_when_formed_then_everybody_has_the_channel(handshake: Handshake) -> None:
    opened: list[Channel] = []
    made = forming(handshake, opened.append)
    with ThreadPoolExecutor(3) as threads:
        waiting = [threads.submit(made.wait, TIMEOUT_S) for _ in range(3)]
        handshake.end()
        assert {each.result(TIMEOUT_S) for each in waiting} == {handshake.channel}
    join()
    assert opened == [handshake.channel]
    assert made.wait(0.0) is handshake.channel


def test_wait_when_it_cannot_be_formed_then_the_reason_now_and_later(handshake: Handshake) -> None:
    opened: list[Channel] = []
    made = forming(handshake, opened.append)
    error = ConnectError(address="here", reason="nobody is there")
    handshake.fail(error)
    for _ in range(2):
        with pytest.raises(ConnectError) as raised:
            made.wait(TIMEOUT_S)
        assert raised.value is error
    assert opened == []


def test_wait_when_not_in_time_then_connect_error_but_the_forming_goes_on(handshake: Handshake) -> None:
    made = forming(handshake)
    with pytest.raises(ConnectError, match=r"no channel within 0\.01 s"):
        made.wait(0.01)
    handshake.end()
    assert made.wait(TIMEOUT_S) is handshake.channel


def test_cancel_when_the_handshake_goes_on_then_waits_end_at_once_and_its_channel_is_closed(
    handshake: Handshake,
) -> None:
    opened: list[Channel] = []
    made = forming(handshake, opened.append)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(made.wait, TIMEOUT_S)
        assert handshake.begun.wait(TIMEOUT_S)
        made.cancel(ClosedError(what="the session"))
        with pytest.raises(ClosedError, match="the session"):
            waiting.result(TIMEOUT_S)
    assert not handshake.is_closed()
    handshake.end()
    join()
    assert handshake.is_closed()
    assert opened == []


def test_cancel_when_formed_then_the_channel_is_closed(handshake: Handshake) -> None:
    made = forming(handshake)
    handshake.end()
    made.wait(TIMEOUT_S)
    made.cancel(ClosedError(what="the session"))
    assert handshake.is_closed()
    with pytest.raises(ClosedError):
        made.wait(TIMEOUT_S)


def test_cancel_when_repeated_then_the_first_reason_stays(handshake: Handshake) -> None:
    made = forming(handshake)
    handshake.end()
    for what in ("first", "second"):
        made.cancel(ClosedError(what=what))
    with pytest.raises(ClosedError, match="first"):
        made.wait(0.0)


AT_EXIT = """
import time
from tdserve.transport import channel_forming
def make():
    time.sleep(DURATION)
    print("given up", flush=True)
    raise channel_forming.ConnectError(address="here", reason="nobody is there")
channel_forming.EXIT_TIMEOUT_S = LIMIT
channel_forming.Forming(make, peer="the other end", name="test-forming")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("duration_s", "limit_s", "said"), [(0.5, 60.0, "given up\n"), (3600.0, 0.2, "")])
def test_interpreter_when_it_ends_then_waits_a_little_for_handshakes(
    duration_s: float, limit_s: float, said: str
) -> None:
    program = AT_EXIT.replace("DURATION", str(duration_s)).replace("LIMIT", str(limit_s))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60.0, check=False)
    assert (done.returncode, done.stdout) == (0, said), done.stderr
