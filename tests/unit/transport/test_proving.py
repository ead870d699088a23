from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any

import pytest
import torch

from tdserve.base.errors import RemoteProtocolError
from tdserve.base.ids import make_secret
from tdserve.transport.proving import (
    MESSAGE_BYTES,
    PROOF_TAG,
    ChannelCredential,
    UnprovenError,
    make_epoch_credential,
    make_hop_credential,
    make_session_credential,
    prove,
)
from tests.gloo_secret import CREDENTIAL, SECRET

TIMEOUT_S = 20.0

Sides = dict[tuple[int, int], "SimpleQueue[bytes]"]


class Work:
    """A receive, or a send, as torch gives one; dropping it ends it."""

    def __init__(self, finish: Callable[[float], None]) -> None:
        self._finish = finish

    def wait(self, timeout: timedelta) -> None:
        self._finish(timeout.total_seconds())


class MemoryGroup:
    """One rank of a group whose messages lie in queues; what it sends is kept, too."""

    def __init__(self, rank: int, queues: Sides) -> None:
        self._rank = rank
        self._queues = queues
        self.sent: list[bytes] = []

    def send(self, buffers: list[torch.Tensor], other: int, tag: int) -> Work:
        assert tag == PROOF_TAG
        message = buffers[0].numpy().tobytes()
        self.sent.append(message)
        self._queues[self._rank, other].put(message)
        return Work(lambda timeout_s: None)

    def recv(self, buffers: list[torch.Tensor], other: int, tag: int) -> Work:
        assert len(buffers[0]) == MESSAGE_BYTES

        def finish(timeout_s: float) -> None:
            try:
                message = self._queues[other, self._rank].get(timeout=timeout_s)
            except Empty as fault:
                raise RuntimeError("Timed out") from fault
            buffers[0].copy_(torch.frombuffer(bytearray(message), dtype=torch.uint8))

        return Work(finish)


def groups(size: int) -> tuple[list[MemoryGroup], Sides]:
    queues: Sides = {(one, other): SimpleQueue() for one in range(size) for other in range(size)}
    return [MemoryGroup(rank, queues) for rank in range(size)], queues


def prove_all(
    bonds: list[ChannelCredential], attempts: list[int] | None = None, *, timeout_s: float = TIMEOUT_S
) -> list[Any]:
    """The end of each rank: None, or its exception."""
    ranks, _ = groups(len(bonds))

    def one(rank: int) -> None:
        attempt = attempts[rank] if attempts else 0
        prove(ranks[rank], rank, len(bonds), bonds[rank], attempt=attempt, timeout_s=timeout_s)

    with ThreadPoolExecutor(len(bonds)) as threads:
        found: list[Future[None]] = [threads.submit(one, rank) for rank in range(len(bonds))]
    return [each.exception() for each in found]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_prove_when_all_have_the_secret_then_all_accept(size: int) -> None:
    assert prove_all([CREDENTIAL] * size) == [None] * size


@pytest.mark.parametrize(
    "other",
    [
        ChannelCredential(make_secret(), CREDENTIAL.purpose),
        ChannelCredential(SECRET, "another purpose"),
        CREDENTIAL.narrow("order"),
    ],
)
def test_prove_when_secret_or_purpose_differ_then_neither_is_content(other: ChannelCredential) -> None:
    assert [type(each) for each in prove_all([CREDENTIAL, other])] == [UnprovenError, UnprovenError]


def test_prove_when_the_attempts_differ_then_neither_is_content() -> None:
    assert [type(each) for each in prove_all([CREDENTIAL, CREDENTIAL], [0, 1])] == [UnprovenError, UnprovenError]


def test_prove_when_one_of_three_is_a_stranger_then_none_accepts() -> None:
    found = prove_all([CREDENTIAL, CREDENTIAL, ChannelCredential(make_secret(), CREDENTIAL.purpose)], timeout_s=0.2)
    assert all(isinstance(each, RuntimeError) for each in found)


def against(stranger: Callable[[bytes, list[bytes]], bytes]) -> BaseException | None:
    """The end of rank 0, if ``stranger`` makes each answer of rank 1 from the message and those before."""
    ranks, queues = groups(2)
    with ThreadPoolExecutor(1) as thread:
        proving = thread.submit(prove, ranks[0], 0, 2, CREDENTIAL, attempt=0, timeout_s=0.5)
        received: list[bytes] = []
        while not proving.done():
            try:
                message = queues[0, 1].get(timeout=0.05)
            except Empty:
                continue
            queues[1, 0].put(stranger(message, received))
            received.append(message)
    return proving.exception()


def test_prove_when_everything_is_reflected_then_not_content() -> None:
    assert isinstance(against(lambda message, received: message), UnprovenError)


def test_prove_when_an_earlier_conversation_is_replayed_then_not_content() -> None:
    ranks, _ = groups(2)
    with ThreadPoolExecutor(2) as threads:
        for rank in (0, 1):
            threads.submit(prove, ranks[rank], rank, 2, CREDENTIAL, attempt=0, timeout_s=TIMEOUT_S)
    assert len(ranks[1].sent) == 2
    assert isinstance(against(lambda message, received: ranks[1].sent[len(received)]), UnprovenError)


def test_prove_when_no_answer_comes_then_runtime_error_and_only_a_nonce_was_sent() -> None:
    ranks, _ = groups(2)
    with pytest.raises(RuntimeError, match="Timed out"):
        prove(ranks[0], 0, 2, CREDENTIAL, attempt=0, timeout_s=0.05)
    assert len(ranks[0].sent) == 1


def test_prove_when_done_then_the_proof_is_the_one_that_the_book_names() -> None:
    ranks, _ = groups(2)
    with ThreadPoolExecutor(2) as threads:
        for rank in (0, 1):
            threads.submit(prove, ranks[rank], rank, 2, CREDENTIAL, attempt=3, timeout_s=TIMEOUT_S)
    head = b"".join(number.to_bytes(4, "little") for number in (3, 2, 1, 0))
    proven = head + ranks[1].sent[0] + ranks[0].sent[0] + CREDENTIAL.purpose.encode()
    assert ranks[1].sent[1] == hmac.new(SECRET, proven, hashlib.sha256).digest()


@pytest.mark.parametrize("secret", [b"", b"short"])
def test_bond_when_the_secret_is_missing_then_refused(secret: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        ChannelCredential(secret, "x")


def test_purposes_when_of_different_groups_then_differ() -> None:
    bonds = [
        make_session_credential(SECRET, 7, is_mail=True),
        make_session_credential(SECRET, 7, is_mail=False),
        make_session_credential(SECRET, 8, is_mail=True),
        make_session_credential(SECRET, 7, channel_number=1),
        make_session_credential(SECRET, 7, channel_number=2),
        make_hop_credential(SECRET, 7),
        make_epoch_credential(SECRET, "7", 7),
        make_epoch_credential(SECRET, "7", 8),
    ]
    assert len({credential.purpose for credential in bonds}) == len(bonds)
