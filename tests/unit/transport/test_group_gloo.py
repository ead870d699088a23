from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tdserve.base.errors import ConnectError, DeadlineExceededError, PeerLostError
from tdserve.transport.group_content import CallChannel
from tdserve.transport.group_gloo import LARGE_BYTES, GroupChannel
from tdserve.transport.rendezvous import KVStore
from tests.gloo_secret import CREDENTIAL
from tests.processes import wait_for
from tests.unit.transport.group_channels import TIMEOUT_S, open_channels


def ones(nbytes: int) -> torch.Tensor:
    return torch.ones(nbytes, dtype=torch.uint8)


@pytest.mark.slow
@pytest.mark.parametrize("nbytes", [1, 3_000_000])
def test_send_when_to_every_other_then_each_gets_what_was_sent(nbytes: int) -> None:
    def exchange(channel: CallChannel) -> list[int]:
        rank, others = channel.rank, [peer for peer in range(3) if peer != channel.rank]
        into = [torch.zeros(nbytes, dtype=torch.uint8) for _ in others]
        works = [channel.expect(buffer, peer) for buffer, peer in zip(into, others, strict=True)]
        works += [channel.post(ones(nbytes) * (10 * rank + peer), peer) for peer in others]
        channel.wait(works)
        return [value for buffer in into for value in sorted(set(buffer.tolist()))]

    with open_channels(3) as channels:
        assert channels.each(exchange) == [[10, 20], [1, 21], [2, 12]]


@pytest.mark.parametrize("nbytes", [8, 3_000_000])
def test_wait_when_nothing_comes_then_deadline_and_every_rank_sees_a_lost_peer(nbytes: int) -> None:
    def wait(channel: CallChannel) -> float:
        begin_s = time.monotonic()
        if channel.rank == 1:
            with pytest.raises(DeadlineExceededError, match="rank 2 of group 'g'"):
                channel.group.wait_all([channel.expect(ones(nbytes), 2)], 0.2)
        else:
            with pytest.raises(PeerLostError):
                channel.wait([channel.expect(ones(nbytes), 1)])
        return time.monotonic() - begin_s

    with open_channels(3) as channels:
        assert max(channels.each(wait)) < 15.0
        with pytest.raises(PeerLostError, match="channel is closed"):
            channels.channels[1].send(ones(1), 0, 1)


def test_close_when_another_thread_waits_for_a_large_message_then_it_is_let_go() -> None:
    with open_channels(2) as channels, ThreadPoolExecutor(1) as thread:
        waits, sends = channels.channels
        works = [waits.recv(ones(3_000_000), 1, 1) for _ in range(2)]
        waiting = thread.submit(waits.wait_all, works, 60.0)
        half_sent = sends.send(ones(3_000_000), 0, 1)  # the second never comes
        sends.close()  # gloo does not tell the other end of it, where the first had come in part
        waits.close()
        waits.close()
        with pytest.raises(PeerLostError):
            waiting.result(TIMEOUT_S)
        del half_sent


def test_close_when_a_large_message_has_not_begun_then_gloo_ends_the_wait_of_the_other_rank() -> None:
    def wait_or_close(channel: CallChannel) -> None:
        if channel.rank == 0:
            with pytest.raises(PeerLostError):
                channel.wait([channel.expect(ones(3_000_000), 1)])
        else:
            channel.group.close()

    with open_channels(2) as channels:
        channels.each(wait_or_close)


@pytest.mark.parametrize("gone", [0, 2])
def test_close_when_another_rank_has_gone_before_then_waits_for_the_rest_end_too(gone: int) -> None:
    with open_channels(3) as channels:
        channel, rest = channels.channels[1], 2 - gone
        works = [channel.recv(ones(nbytes), rest, 1) for nbytes in (8, 3_000_000)]
        channels.channels[gone].close()
        wait_for(lambda: is_closed(channel, gone), f"the end of the pair with rank {gone}")
        channel.close()
        begin_s = time.monotonic()
        for work in works:
            with pytest.raises(RuntimeError):
                work.block(begin_s + 10.0)
        assert time.monotonic() - begin_s < 5.0


def is_closed(channel: GroupChannel, peer: int) -> bool:
    """Whether the pair with a rank is closed already, as this end sees it; then the channel is closed too."""
    try:
        channel.recv(ones(1), peer, 99)
    except PeerLostError:
        return True
    return False


def test_recv_when_behind_a_large_message_then_it_may_be_cut_too() -> None:
    with open_channels(2) as channels:
        first, second = channels.channels
        sizes = (LARGE_BYTES - 1, LARGE_BYTES, 8)
        coming = [first.recv(ones(nbytes), 1, 1) for nbytes in sizes]
        going = [second.send(ones(nbytes), 0, 1) for nbytes in sizes]
        for works in (coming, going):
            assert [work.is_large for work in works] == [False, True, True]
        for work in coming:
            first.wait_all([work], 5.0)
        second.wait_all(going, 5.0)
        assert not first.recv(ones(8), 1, 1).is_large
        assert not second.send(ones(8), 0, 1).is_large


def test_wait_when_a_rank_has_gone_then_the_error_has_its_given_name() -> None:
    with open_channels(2, names=["the first", "the second"]) as channels:
        work = channels.channels[0].recv(ones(8), 1, 1)
        channels.channels[1].close()
        with pytest.raises(PeerLostError, match=r"^lost the second: [^[/]"):
            channels.channels[0].wait_all([work], 5.0)


def test_channel_when_of_one_rank_then_formed_and_closed() -> None:
    with open_channels(1) as channels:
        assert channels.channels[0].world_size == 1


def test_channel_when_the_others_do_not_come_then_connect_error() -> None:
    store = KVStore(lambda key, value: None)
    with pytest.raises(ConnectError, match="gloo"):
        GroupChannel(store, 0, 2, host="127.0.0.1", credential=CREDENTIAL, name="g", timeout_s=0.1)
