"""Extends that a worker writes by itself; control's end of the claim file is here."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path as FilePath

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tdserve.base.config import MAIL_WRITE
from tdserve.control.status import decode_failure
from tdserve.messages.content import write_layout
from tdserve.messages.row_numbers import decode_rows
from tdserve.rules.tags import make_tag
from tdserve.store.rows.claim_file import FOLDER, LOST, ClaimFile
from tdserve.transport.message_channel import MessageChannel
from tdserve.v1 import content_pb2, control_pb2, worker_pb2
from tdserve.worker.worker_claims import MAX_WAIT_S
from tests.unit.worker.peer import CLIENT_ID, TIMEOUT_S, Peer, StoredTensorDict

CAPACITY = 6
NUM_ALLOWED = 4


class Table:
    """A table of six rows that lie as zeros, four of which a worker may claim, from row 4 on."""

    def __init__(self, folder: FilePath, peer: Peer) -> None:
        td = TensorDict({"a": torch.zeros(CAPACITY, dtype=torch.int64), "b": torch.zeros(CAPACITY, 100)}, [CAPACITY])
        self.stored = StoredTensorDict(folder, td)
        self.file = ClaimFile.create(folder / FOLDER / "worker.1", NUM_ALLOWED)
        self.file.request_messages(1000)
        peer.context.stores.learn(self.stored.ref.fingerprint, self.stored.ref.spec)
        claim = control_pb2.Claim(first_row=4, uid=self.stored.ref.uid, num=1, path="somewhere/claims/worker.1")
        self.opening = worker_pb2.OpenClaim(store=self.stored.ref, claim=claim)
        self.preparing = worker_pb2.PrepareClaim(store=self.stored.ref)
        peer.context.worker_claims.open(self.opening)

    def read(self) -> list[int]:
        """Returns the number that each row shows, in both leaves."""
        a, b = self.stored.leaves[("a",)], self.stored.leaves[("b",)]
        assert (b == a[:, None]).all()
        found: list[int] = a.tolist()
        return found


@pytest.fixture
def peer() -> Iterator[Peer]:
    made = Peer()
    made.open_channel()
    yield made
    made.close()


@pytest.fixture
def mail(peer: Peer) -> MessageChannel:
    """The client's end of the session's mail."""
    return peer.open_mail()


@pytest.fixture
def table(tmp_path: FilePath, peer: Peer) -> Table:
    return Table(tmp_path / "store", peer)


def make_content(table: Table, number: int, num_rows: int) -> bytes:
    """Returns the content of rows that all show one number."""
    layout = write_layout(table.stored.spec.with_rows(num_rows))
    leaves: dict[tuple[str, ...], bytes] = {
        ("a",): np.full(num_rows, number, np.int64).tobytes(),
        ("b",): np.full((num_rows, 100), number, np.float32).tobytes(),
    }
    content = bytearray(layout.nbytes)
    for slot in layout.slots:
        content[slot.offset : slot.offset + slot.nbytes] = leaves[slot.path]
    return bytes(content[: sum(layout.message_nbytes)])


def make_extend(
    table: Table, request: int, num_rows: int, *, follows: int = 0, is_inline: bool = True
) -> control_pb2.ClientMessage:
    """Returns a plain extend by rows that show the number of the request."""
    content = control_pb2.Content(fingerprint=table.stored.spec.fingerprint)
    if is_inline:
        content.inline = make_content(table, request, num_rows)
    else:
        content.message_nbytes.extend(write_layout(table.stored.spec.with_rows(num_rows)).message_nbytes)
    asked = control_pb2.ExtendRequest(
        store="store", num_rows=num_rows, content=content, wished_claim=10, follows=follows
    )
    return control_pb2.ClientMessage(request=request, extend=asked)


def send(mail: MessageChannel, message: control_pb2.ClientMessage) -> None:
    """Sends an extend that the worker may write."""
    mail.send(message.SerializeToString(), MAIL_WRITE)


def next_answer(peer: Peer) -> control_pb2.ServerMessage:
    """Returns the oldest answer of the worker that was not taken."""
    return control_pb2.ServerMessage.FromString(peer.mails.get(timeout=TIMEOUT_S))


def next_forwarded(peer: Peer) -> control_pb2.ClientMessage:
    """Returns the oldest message to control that was not taken."""
    report = peer.next_report()
    assert report.HasField("mail"), report
    return control_pb2.ClientMessage.FromString(report.mail)


def test_extend_when_rows_may_be_claimed_then_stored_and_on_record_round_the_ring(
    peer: Peer, mail: MessageChannel, table: Table
) -> None:
    send(mail, make_extend(table, 11, 3))
    answer = next_answer(peer)
    assert answer.request == 11
    assert decode_rows(answer.done.indices).tolist() == [4, 5, 0]
    assert table.read() == [11, 0, 0, 0, 11, 11]
    assert table.file.record(0) == (CLIENT_ID, 11, 3)
    assert table.stored.generations.values[[4, 5, 0]].tolist() == [3, 3, 3], "control makes them live"
    send(mail, make_extend(table, 12, 1))
    assert decode_rows(next_answer(peer).done.indices).tolist() == [1]
    assert peer.reports.empty(), "control has not asked for reports"


def test_extend_when_its_content_comes_over_the_channel_then_received_and_stored(
    peer: Peer, mail: MessageChannel, table: Table
) -> None:
    send(mail, make_extend(table, 21, 2, is_inline=False))
    content = torch.frombuffer(bytearray(make_content(table, 21, 2)), dtype=torch.uint8)
    peer.channel.send(content, make_tag(21)).wait(TIMEOUT_S)
    assert decode_rows(next_answer(peer).done.indices).tolist() == [4, 5]
    assert table.read() == [0, 0, 0, 0, 21, 21]


def test_extend_when_control_asked_for_reports_then_it_gets_one(peer: Peer, mail: MessageChannel, table: Table) -> None:
    table.file.request_messages(0)
    send(mail, make_extend(table, 1, 1))
    assert peer.next_report().claimed == control_pb2.Claimed(uid=table.stored.ref.uid, num=1)
    assert next_answer(peer).request == 1


def test_extend_when_it_also_reports_which_answers_have_arrived_then_control_learns_that(
    peer: Peer, mail: MessageChannel, table: Table
) -> None:
    message = make_extend(table, 1, 1)
    message.answered.below = 1
    send(mail, message)
    assert next_forwarded(peer) == control_pb2.ClientMessage(answered=control_pb2.Answered(below=1))
    assert next_answer(peer).HasField("done")


def test_extend_when_it_does_not_fit_what_may_be_claimed_then_control_gets_it_as_it_is(
    peer: Peer, mail: MessageChannel, table: Table
) -> None:
    longer, other, partial = make_extend(table, 1, NUM_ALLOWED + 1), make_extend(table, 2, 1), make_extend(table, 3, 1)
    other.extend.content.fingerprint = b"another"
    partial.extend.keys.append(content_pb2.Path(parts=["a"]))
    elsewhere = make_extend(table, 4, 1)
    elsewhere.extend.store = "another"
    of_queue = make_extend(table, 5, 1)
    of_queue.extend.kind = control_pb2.STORE_KIND_QUEUE
    for message in (longer, other, partial, elsewhere, of_queue):
        send(mail, message)
        assert next_forwarded(peer) == message
    assert table.file.num_claimed == 0


def test_extend_when_control_has_an_earlier_one_of_the_session_then_it_follows_that(
    peer: Peer, mail: MessageChannel, table: Table
) -> None:
    send(mail, make_extend(table, 1, NUM_ALLOWED + 1))
    send(mail, make_extend(table, 2, 1, follows=1))
    assert [next_forwarded(peer).request for _ in range(2)] == [1, 2]
    send(mail, make_extend(table, 3, 1, follows=2))
    assert next_forwarded(peer).request == 3, "the second one has no answer yet"
    send(mail, make_extend(table, 4, 1))
    send(mail, make_extend(table, 5, 1, follows=4))
    assert [next_answer(peer).request for _ in range(2)] == [4, 5]


def test_extend_when_the_claim_ends_after_its_content_has_come_then_control_gets_the_content(
    peer: Peer, mail: MessageChannel, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ClaimFile, "claim", lambda file, num_rows: LOST)
    send(mail, make_extend(table, 1, 1, is_inline=False))
    content = torch.frombuffer(bytearray(make_content(table, 1, 1)), dtype=torch.uint8)
    peer.channel.send(content, make_tag(1)).wait(TIMEOUT_S)
    abandoned = peer.next_report().claimed
    assert abandoned.abandons
    assert next_forwarded(peer) == make_extend(table, 1, 1)
    assert table.read() == [0] * CAPACITY


def test_extend_when_its_content_does_not_come_then_it_fails_and_the_channel_is_replaced(
    peer: Peer, mail: MessageChannel, table: Table
) -> None:
    send(mail, make_extend(table, 1, 1, is_inline=False))
    peer.channel.close()
    answer = next_answer(peer)
    assert (answer.request, decode_failure(answer.failure).retryable) == (1, True)
    assert peer.next_report().HasField("channel_lost")
    assert table.file.num_claimed == 0


def test_extend_when_the_store_was_deleted_then_control_gets_it(peer: Peer, mail: MessageChannel, table: Table) -> None:
    table.stored.generations.mark_deleted()
    send(mail, make_extend(table, 1, 1))
    assert next_forwarded(peer).request == 1


def test_open_when_the_claim_file_is_gone_then_abandoned(peer: Peer, table: Table) -> None:
    claim = control_pb2.Claim(uid=table.stored.ref.uid, num=2, path="somewhere/claims/worker.2")
    peer.context.worker_claims.open(worker_pb2.OpenClaim(store=table.stored.ref, claim=claim))
    assert peer.next_report().claimed == control_pb2.Claimed(uid=claim.uid, num=2, abandons=True)


def make_write(table: Table, request: int, nbytes: int) -> control_pb2.ClientMessage:
    """Returns a write whose content of so many bytes follows over the channel."""
    content = control_pb2.Content(fingerprint=table.stored.spec.fingerprint, message_nbytes=[nbytes])
    return control_pb2.ClientMessage(request=request, write=control_pb2.WriteRequest(store="store", content=content))


def test_write_when_its_content_is_small_then_control_gets_both_together(
    peer: Peer, mail: MessageChannel, table: Table
) -> None:
    message, content = make_write(table, 5, 1000), torch.arange(1000).to(torch.uint8)
    send(mail, message)
    peer.channel.send(content, make_tag(5)).wait(TIMEOUT_S)
    message.write.content.inline = content.numpy().tobytes()
    del message.write.content.message_nbytes[:]
    assert next_forwarded(peer) == message


def test_write_when_its_content_is_large_or_on_another_channel_then_control_decides(
    peer: Peer, mail: MessageChannel, table: Table
) -> None:
    large, elsewhere, empty = make_write(table, 1, 1 << 20), make_write(table, 2, 10), make_write(table, 3, 0)
    elsewhere.channel = 1
    for message in (large, elsewhere, empty):
        send(mail, message)
        assert next_forwarded(peer) == message


def test_extend_when_a_claim_is_about_to_be_opened_then_waits_for_it(
    peer: Peer, mail: MessageChannel, table: Table
) -> None:
    claims = peer.context.worker_claims
    claims.drop(table.stored.ref.uid)
    claims.prepare(table.preparing)
    send(mail, make_extend(table, 7, 2))
    claims.open(table.opening)
    assert decode_rows(next_answer(peer).done.indices).tolist() == [4, 5]


def test_extend_when_a_claim_is_about_to_be_opened_and_is_not_then_handed_to_control(
    peer: Peer, mail: MessageChannel, table: Table
) -> None:
    claims = peer.context.worker_claims
    claims.drop(table.stored.ref.uid)
    for request, is_decided in ((7, True), (8, False)):
        begun_s = time.monotonic()
        claims.prepare(table.preparing)
        send(mail, make_extend(table, request, 2))
        if is_decided:
            claims.open(worker_pb2.OpenClaim(store=table.stored.ref))
        assert next_forwarded(peer).request == request
        assert is_decided or time.monotonic() - begun_s >= MAX_WAIT_S
