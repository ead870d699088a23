from __future__ import annotations

import os
import re
import socket
import stat
import struct
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from threading import Event
from typing import Any

import pytest
import torch

from tdserve.base.errors import ConnectError, DeadlineExceededError, PeerLostError
from tdserve.transport import gloo
from tdserve.transport.channel import Channel
from tdserve.transport.gloo import CLIENT_RANK, WHOLE_MESSAGE_BYTES, GlooChannel
from tdserve.transport.proven import MAX_UNFORMED, close_pairs
from tdserve.transport.rendezvous import KVStore
from tests.channel_pairs import gloo_pair
from tests.gloo_secret import CREDENTIAL
from tests.processes import wait_for
from tests.stranger import CONTENT, PREAMBLE


def test_connect_when_the_session_ends_meanwhile_then_connect_error() -> None:
    store = KVStore(lambda key, value: None)
    store.close()
    with pytest.raises(ConnectError, match="gloo"):
        GlooChannel(store, CLIENT_RANK, host="127.0.0.1", credential=CREDENTIAL, peer="nobody")


def test_connect_when_the_address_is_not_ours_then_connect_error() -> None:
    store = KVStore(lambda key, value: None)
    with pytest.raises(ConnectError) as raised:
        GlooChannel(store, CLIENT_RANK, host="192.0.2.1", credential=CREDENTIAL, peer="nobody")
    assert raised.value.address == "192.0.2.1"


@pytest.mark.parametrize("garbage", [b"", b"\xff" * 8, b"\xff" * 4096])
def test_connect_when_the_other_ends_address_is_garbage_then_connect_error(garbage: bytes) -> None:
    store = KVStore(lambda key, value: None)
    store.feed("attempt 0/0/0", garbage)  # of a client that means ill; gloo crashes, or raises errors of several kinds
    with pytest.raises(ConnectError, match="gloo"):
        GlooChannel(store, CLIENT_RANK, host="127.0.0.1", credential=CREDENTIAL, peer="nobody", timeout_s=0.2)


def test_connect_when_the_other_end_connects_to_what_was_given_up_then_its_connection_does_not_stay() -> None:
    num_fds = len(os.listdir("/proc/self/fd"))
    for number in range(6 * MAX_UNFORMED):
        addresses: list[bytes] = []
        store = KVStore(lambda key, value, addresses=addresses: addresses.append(value))  # type: ignore[misc]
        store.close()
        with pytest.raises(ConnectError):
            GlooChannel(store, CLIENT_RANK, host="127.0.0.1", credential=CREDENTIAL, peer="nobody")
        found = re.search(rb"\x02\x00(..)\x7f\x00\x00\x01", addresses[0], re.DOTALL)  # a sockaddr_in
        assert found is not None
        port = int.from_bytes(found[1], "big")
        with suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)) as other:
            other.sendall(struct.pack("=q", -number - 1))  # the number of a pair that nobody waits for
    wait_for(lambda: len(os.listdir("/proc/self/fd")) <= num_fds + 2 * MAX_UNFORMED, "the end of old connections")


@pytest.mark.parametrize("timeout_s", [0.0, 0.0109, 0.0209, 0.0309, 0.0409])
def test_wait_when_timeout_is_no_whole_millisecond_then_still_a_deadline(timeout_s: float) -> None:
    first, second = gloo_pair()
    with pytest.raises(DeadlineExceededError) as raised:
        second.recv(torch.zeros(8, dtype=torch.uint8), 0).wait(timeout_s)
    assert raised.value.timeout_s == timeout_s
    first.close()


def test_wait_when_another_one_lasts_too_long_then_the_error_names_it() -> None:
    first, second = gloo_pair()
    with ThreadPoolExecutor(1) as thread:
        work = second.recv(torch.zeros(8, dtype=torch.uint8), 0)
        waiting = thread.submit(work.wait, 60.0)
        with pytest.raises(DeadlineExceededError):
            second.recv(torch.zeros(8, dtype=torch.uint8), 1).wait(0.05)
        with pytest.raises(PeerLostError, match=r"a gloo transfer did not happen within 0\.05 s"):
            waiting.result(10.0)
    first.close()


def test_close_when_another_thread_is_about_it_then_waits_for_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = gloo_pair()
    begun, may_end = Event(), Event()

    def close_slowly(*group: Any) -> None:
        begun.set()
        assert may_end.wait(20.0)
        close_pairs(*group)

    monkeypatch.setattr(gloo, "close_pairs", close_slowly)
    with ThreadPoolExecutor(2) as threads:
        closing = [threads.submit(first.close)]
        assert begun.wait(20.0)
        closing.append(threads.submit(first.close))
        try:
            assert not wait(closing, 0.1).done
        finally:
            may_end.set()
        assert not wait(closing, 20.0).not_done
    second.close()


def test_wait_when_closed_meanwhile_then_peer_lost() -> None:
    first, second = gloo_pair()
    with ThreadPoolExecutor(1) as thread:
        work = second.recv(torch.zeros(8, dtype=torch.uint8), 0)
        waiting = thread.submit(work.wait, 60.0)
        second.close()
        with pytest.raises(PeerLostError, match="the channel was closed"):
            waiting.result(10.0)
    first.close()


def list_connections() -> dict[int, int]:
    """Returns the TCP connections of this process: descriptors, and how many bytes each has received."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as each:
                    each.getpeername()
                    tcp_info = each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
                    found[int(name)] = struct.unpack_from("<Q", tcp_info, 128)[0]
    return found


def send_half(sender: Channel, nbytes: int, tag: int, others: set[int]) -> None:
    """Sends the first half of a message, as gloo does when the socket accepts no more.

    Args:
        others: Descriptors of connections that are not those of the sender and its peer.
    """
    before = list_connections()
    sender.send(torch.zeros(8, dtype=torch.uint8), 100)
    mine = before.keys() - others
    wait_for(lambda: any(list_connections()[fd] > before[fd] for fd in mine), "the arrival of what was sent")
    now = list_connections()
    (own,) = [fd for fd in mine if now[fd] == before[fd]]
    os.write(own, PREAMBLE.pack(PREAMBLE.size + nbytes, CONTENT, tag, 0, nbytes, 0) + b"x" * (nbytes // 2))


@pytest.mark.parametrize("nbytes", [WHOLE_MESSAGE_BYTES + 2, 80_000, 2_000_000])
def test_wait_when_the_channel_is_closed_in_the_middle_of_a_message_then_it_ends(nbytes: int) -> None:
    others = set(list_connections())
    first, second = gloo_pair()
    received = torch.zeros(nbytes, dtype=torch.uint8)
    work = second.recv(received, 3)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(work.wait, 60.0)
        send_half(first, nbytes, 3, others)
        wait_for(lambda: int(received[nbytes // 2 - 1]) == ord("x"), "half of the message")
        second.close()
        with pytest.raises(PeerLostError, match="the channel was closed"):
            waiting.result(20.0)
    first.close()
