from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tdserve.base.errors import ConnectError
from tdserve.base.ids import make_secret
from tdserve.transport import proven
from tdserve.transport.gloo import CLIENT_RANK, WORKER_RANK, GlooChannel
from tdserve.transport.proven import MAX_UNFORMED, get_gloo_device, leave_all_devices, note_unformed, refusals
from tdserve.transport.proving import ChannelCredential, prove
from tdserve.transport.rendezvous import KVStore
from tests.channel_pairs import gloo_pair
from tests.gloo_secret import CREDENTIAL
from tests.stranger import (
    Line,
    be_cut_short,
    be_silent,
    be_wrong,
    device_of_this_process,
    hang_up,
    reflect,
    taken,
)
from tests.unit.transport.group_channels import open_channels

TIMEOUT_S = 20.0
NUM_TAKEN = 60


@pytest.fixture(autouse=True)
def _device_without_unformed_groups() -> None:
    """Earlier tests may have left a device in such a state that one more unformed group makes the next group use
    another device. Then a stranger takes numbers that nobody uses."""
    leave_all_devices()


def check(pair: tuple[GlooChannel, GlooChannel]) -> None:
    """A message goes each way; both ends are closed."""
    for sender, receiver in (pair, pair[::-1]):
        received = torch.zeros(5, dtype=torch.uint8)
        works = [receiver.recv(received, 3), sender.send(torch.arange(5, dtype=torch.uint8), 3)]
        for work in works:
            work.wait(TIMEOUT_S)
        assert received.tolist() == [0, 1, 2, 3, 4]
    for end in pair:
        end.close()


@pytest.mark.slow
@pytest.mark.parametrize("behave", [be_silent, be_wrong, reflect, be_cut_short, hang_up])
def test_pair_when_a_stranger_has_the_next_numbers_then_it_is_formed_all_the_same(
    behave: Callable[[Line], None],
) -> None:
    port, number = device_of_this_process()
    before = refusals.num
    with taken(port, range(number, number + NUM_TAKEN), behave) as became:
        began_s = time.monotonic()
        check(gloo_pair())  # type: ignore[arg-type]
        assert time.monotonic() - began_s < TIMEOUT_S
        assert became
        assert refusals.num > before


def test_group_when_a_stranger_has_the_next_numbers_then_it_is_formed_all_the_same() -> None:
    port, number = device_of_this_process()
    with taken(port, range(number, number + NUM_TAKEN), be_wrong) as became, open_channels(3) as channels:
        for rank, channel in enumerate(channels.channels):
            assert (channel.rank, channel.world_size) == (rank, 3)
        assert became


def test_pair_when_refused_then_logged_once_with_the_connected_addresses(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proven, "refusals", type(refusals)())
    for _ in range(2):
        port, number = device_of_this_process()
        with caplog.at_level(logging.WARNING), taken(port, range(number, number + 5), be_wrong):
            check(gloo_pair())  # type: ignore[arg-type]
    assert len(caplog.records) == 1
    message = caplog.records[0].getMessage()
    assert f"connected to port {port} are 127.0.0.1 (" in message or "are 127.0.0.1 (" in message
    assert "a test" in message
    assert "proof is wrong" in message or "no proof came" in message


def test_pair_when_the_ends_have_different_secrets_then_connect_error_in_time() -> None:
    stores: list[KVStore] = []
    for other in (1, 0):
        stores.append(KVStore(lambda key, value, other=other: stores[other].feed(key, value)))  # type: ignore[misc]
    with ThreadPoolExecutor(2) as threads:
        ends = [
            threads.submit(GlooChannel, store, rank, host="127.0.0.1", credential=credential, peer="it", timeout_s=0.5)
            for store, rank, credential in zip(
                stores,
                (WORKER_RANK, CLIENT_RANK),
                (CREDENTIAL, ChannelCredential(make_secret(), CREDENTIAL.purpose)),
                strict=True,
            )
        ]
    for end in ends:
        with pytest.raises(ConnectError, match="prove"):
            end.result()


def test_pair_when_a_proof_comes_too_late_for_one_end_then_both_use_another(monkeypatch: pytest.MonkeyPatch) -> None:
    def prove_late(group: Any, rank: int, *args: Any, attempt: int, **options: Any) -> None:
        prove(group, rank, *args, attempt=attempt, **options)
        if (attempt, rank) in ((0, WORKER_RANK), (1, CLIENT_RANK)):
            raise RuntimeError("Timed out")

    monkeypatch.setattr(proven, "prove", prove_late)
    before = refusals.num
    began_s = time.monotonic()
    check(gloo_pair())  # type: ignore[arg-type]
    assert time.monotonic() - began_s < TIMEOUT_S / 2
    assert refusals.num == before + 4


def test_pair_when_its_session_is_closed_meanwhile_then_not_tried_again() -> None:
    stores: list[KVStore] = []
    for other in (1, 0):
        stores.append(KVStore(lambda key, value, other=other: stores[other].feed(key, value)))  # type: ignore[misc]
    port, number = device_of_this_process()

    def close_and_be_wrong(line: Line) -> None:
        for store in stores:
            store.close()
        be_wrong(line)

    began_s = time.monotonic()
    with taken(port, range(number, number + 3), close_and_be_wrong), ThreadPoolExecutor(2) as threads:
        ends = [
            threads.submit(GlooChannel, store, rank, host="127.0.0.1", credential=CREDENTIAL, peer="it")
            for store, rank in zip(stores, (WORKER_RANK, CLIENT_RANK), strict=True)
        ]
        for end in ends:
            with pytest.raises(ConnectError, match="was closed"):
                end.result()
    assert time.monotonic() - began_s < TIMEOUT_S


def test_group_when_formed_then_it_has_one_thread_of_its_own() -> None:
    for end in gloo_pair():
        end.close()
    before = len(os.listdir("/proc/self/task"))
    pairs = [gloo_pair() for _ in range(3)]
    assert len(os.listdir("/proc/self/task")) <= before + 6 + 1  # six groups, and their device
    for pair in pairs:
        check(pair)  # type: ignore[arg-type]


def test_device_when_groups_do_not_form_on_it_then_another_is_used() -> None:
    device = get_gloo_device("127.0.0.1", os.getpid())
    assert get_gloo_device("127.0.0.1", os.getpid()) is device
    for _ in range(MAX_UNFORMED):
        note_unformed("127.0.0.1", os.getpid())
    assert get_gloo_device("127.0.0.1", os.getpid()) is not device
