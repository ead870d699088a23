"""Writes with little content, which the thread that reads a session's mail stores or hands to control."""

from __future__ import annotations

import logging
import time
from typing import NamedTuple

import torch
from google.protobuf.message import DecodeError

from tdserve.base.errors import DeadlineExceededError, TransferAbortedError, TransportError
from tdserve.control.status import encode_failure
from tdserve.messages.row_numbers import Rows, encode_rows
from tdserve.rules.tags import make_tag
from tdserve.store.rows.claim_file import ClaimedRows
from tdserve.v1 import control_pb2
from tdserve.worker.lane import Lane
from tdserve.worker.observed_work import ObservedWork
from tdserve.worker.worker_claims import WorkerClaim, WorkerClaims

MAX_CLAIMED_BYTES = 256 * 1024
"""Largest content that this thread receives and stores: that takes some 100 microseconds."""

MAX_HANDED_ON_BYTES = 128 * 1024
"""Largest content that it receives for control, through which it then passes twice."""

_log = logging.getLogger("tdserve.worker")


class Handled(NamedTuple):
    """What follows from a message: serialised messages to the client and to control, b"" for none."""

    to_client: bytes = b""
    to_control: bytes = b""


class SessionWrites:
    """The writes of one session that come by mail, with content that is small. Threads: the one that reads its mail.

    Extends of one session are stored in their order: while control has one, later ones follow it there.

    Args:
        client_id: Id of the session's client.
        claims: The worker's.
        observed: Counts the extends that are stored here, by their time.
    """

    def __init__(self, client_id: bytes, claims: WorkerClaims, observed: ObservedWork) -> None:
        self._client_id = client_id
        self._claims = claims
        self._observed = observed
        self._last_forwarded = 0

    def handle(self, mail: bytes, lane: Lane) -> Handled:
        """Stores an extend, or hands a write to control.

        Args:
            mail: A serialised ClientMessage.
            lane: The session's.
        """
        try:
            message = control_pb2.ClientMessage.FromString(mail)
        except DecodeError:
            return Handled(to_control=mail)  # which ends the session
        try:
            return self._extend(mail, message, lane) if message.HasField("extend") else _hand_on(mail, message, lane)
        except (TransportError, DeadlineExceededError) as error:
            lane.fail(error)
            reason = TransferAbortedError(transfer=message.request, reason=str(error))
            failed = control_pb2.ServerMessage(request=message.request, failure=encode_failure(reason))
            return Handled(failed.SerializeToString(), _make_report(message))

    def _extend(self, mail: bytes, message: control_pb2.ClientMessage, lane: Lane) -> Handled:
        asked, begun_s = message.extend, time.perf_counter()
        is_next = self._last_forwarded < (asked.follows or message.request)
        claim = self._claims.find(asked) if is_next else None
        sizes = () if claim is None else claim.get_layout(asked.num_rows).message_nbytes
        content = _take_content(message, asked.content, sizes, lane) if sum(sizes) <= MAX_CLAIMED_BYTES else None
        rows = None if claim is None or content is None else self._store(claim, message, content)
        if rows is None:
            self._last_forwarded = max(self._last_forwarded, message.request)
            return _forward(mail, message, asked.content, content)
        self._observed.count("extend", begun_s)
        done = control_pb2.Done(indices=encode_rows(rows))
        answer = control_pb2.ServerMessage(request=message.request, done=done)
        return Handled(answer.SerializeToString(), _make_report(message))

    def _store(self, claim: WorkerClaim, message: control_pb2.ClientMessage, content: torch.Tensor) -> Rows | None:
        extend = ClaimedRows(self._client_id, message.request, message.extend.num_rows)
        try:
            return claim.extend(extend, content)
        except Exception:  # noqa: BLE001 (control finds the record, if one was written, or stores the rows)
            _log.exception("rows of %r could not be written", message.extend.store)
            return None


def _hand_on(mail: bytes, message: control_pb2.ClientMessage, lane: Lane) -> Handled:
    """Hands a write to control, with its content if that can be received now: control would order just that."""
    content = message.write.content
    sizes = tuple(content.message_nbytes)
    is_small = 0 < sum(sizes) <= MAX_HANDED_ON_BYTES and not content.HasField("inline")
    return _forward(mail, message, content, _take_content(message, content, sizes, lane) if is_small else None)


def _take_content(
    message: control_pb2.ClientMessage, content: control_pb2.Content, sizes: tuple[int, ...], lane: Lane
) -> torch.Tensor | None:
    """Returns the messages of a write, one behind the other, received if need be; None if control must have that done.

    Raises:
        TransportError, DeadlineExceededError: They did not come.
    """
    if not sizes or content.values_nbytes or content.values:
        return None
    if content.HasField("inline"):
        is_whole = len(content.inline) == sum(sizes)
        return torch.frombuffer(bytearray(content.inline), dtype=torch.uint8) if is_whole else None
    is_expected = tuple(content.message_nbytes) == sizes
    if not is_expected or message.channel != lane.channel_number or not lane.may_send_at_once:
        return None
    return lane.receive_at_once(make_tag(message.request), sizes)


def _forward(
    mail: bytes, message: control_pb2.ClientMessage, content: control_pb2.Content, received: torch.Tensor | None
) -> Handled:
    """Hands a write to control, as it came or with content that has left the channel."""
    if received is None:
        return Handled(to_control=mail)
    content.inline = received.numpy().tobytes()
    del content.message_nbytes[:]
    return Handled(to_control=message.SerializeToString())


def _make_report(message: control_pb2.ClientMessage) -> bytes:
    """Returns what control has to learn from a message that it does not get: which answers have arrived."""
    if not message.HasField("answered"):
        return b""
    return control_pb2.ClientMessage(answered=message.answered).SerializeToString()
