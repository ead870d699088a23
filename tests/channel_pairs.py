"""Pairs of channels in one process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from tdserve.transport.channel import Channel, Work
from tdserve.transport.gloo import CLIENT_RANK, WORKER_RANK, GlooChannel
from tdserve.transport.message_channel import ENDLESS_S
from tdserve.transport.ordered import OrderedChannel
from tdserve.transport.rendezvous import KVStore
from tests.gloo_secret import CREDENTIAL

Ends = tuple[Channel, Channel]


def gloo_pair() -> Ends:
    """Two ends in this process; their key-value stores are joined as two processes' are by the session."""
    stores: list[KVStore] = []
    for other in (1, 0):
        stores.append(KVStore(lambda key, value, other=other: stores[other].feed(key, value)))  # type: ignore[misc]
    with ThreadPoolExecutor(2) as threads:
        ranks = (WORKER_RANK, CLIENT_RANK)
        ends = [
            threads.submit(GlooChannel, store, rank, host="127.0.0.1", credential=CREDENTIAL, peer="the other end")
            for store, rank in zip(stores, ranks, strict=True)
        ]
        return ends[0].result(), ends[1].result()


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
