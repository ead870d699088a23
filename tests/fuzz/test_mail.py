"""Random mail to a data worker, which has a claim: it is answered or handed to control, and stores nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from tdserve.base.config import MAIL_BYTES, MAIL_READ, MAIL_WRITE
from tdserve.transport.message_channel import MessageChannel
from tdserve.v1 import control_pb2
from tests.fuzz.inputs import Inputs
from tests.fuzz.requests import make_requests
from tests.unit.worker.peer import Peer
from tests.unit.worker.test_session_writes import Table, make_content, make_extend

NUM_SESSIONS = 6
PER_SESSION = 60


def make_mail(inputs: Inputs, table: Table, request: int) -> bytes:
    """Returns an extend that the worker may write, or another request, mostly with random faults."""
    rng = inputs.rng
    extend = make_extend(table, request, rng.choice((1, 1, 2, 3)))
    message = extend if rng.random() < 0.6 else rng.choice(make_requests())
    if rng.random() < 0.7:
        inputs.change(message)
    content = message.SerializeToString()
    return (inputs.mutate(content) if rng.random() < 0.2 else content)[:MAIL_BYTES]


def send_random_mail(folder: Path, seed: int) -> None:
    """Sends mail to a worker; a last request that it hands on shows that it has read all."""
    peer = Peer()
    try:
        mail: MessageChannel = peer.open_mail()
        table = Table(folder, peer)
        inputs = Inputs(seed, names=["store"], blobs=[table.stored.spec.fingerprint, make_content(table, 1, 1)])
        for request in range(1, PER_SESSION + 1):
            mail.send(make_mail(inputs, table, request), inputs.rng.choice((MAIL_WRITE, MAIL_WRITE, MAIL_READ, 0, 9)))
        last = control_pb2.ClientMessage(request=2**40, cancel=control_pb2.CancelRequest(cancelled=1))
        mail.send(last.SerializeToString())
        while (report := peer.next_report()).mail != last.SerializeToString():
            assert not report.HasField("session_lost"), report
    finally:
        peer.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(NUM_SESSIONS))
def test_mail_when_random_then_answered_or_handed_to_control_and_the_session_goes_on(tmp_path: Path, seed: int) -> None:
    send_random_mail(tmp_path / "store", seed)


@pytest.mark.full
def test_mail_when_random_and_very_much_then_likewise(tmp_path: Path) -> None:
    for seed in range(100, 300):
        send_random_mail(tmp_path / f"store-{seed}", seed)
