"""Extends that the thread that reads a session's mail writes, or hands to control."""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch

from tdserve.base.errors import DeadlineExceededError, TransferAbortedError, TransportError
from tdserve.control.status import encode_failure
from tdserve.messages.content import check_inline
from tdserve.messages.layout import Layout
from tdserve.messages.row_numbers import Rows, encode_rows
from tdserve.rules.tags import make_tag
from tdserve.store.claim_file import ClaimedRows
from tdserve.v1 import control_pb2
from tdserve.worker.lane import Lane
from tdserve.worker.small_writes import SmallWrites, WorkerClaim

MAX_CLAIMED_BYTES = 256 * 1024
"""Largest content that this thread receives and stores: that takes some 100 microseconds."""

_log = logging.getLogger("tdserve.worker")


class Handled(NamedTuple):
    """What follows from a message: serialised messages to the client and to control, b"" for none."""

    to_client: bytes = b""
    to_control: bytes = b""


class SessionExtends:
    """The extends of one session that come by mail. Threads: the one that reads its mail.

    Extends of one session are stored in their order: while control has one, later ones follow it there.

    Args:
        client_id: Id of the session's client.
        writes: The worker's claims.
    """

    def __init__(self, client_id: bytes, writes: SmallWrites) -> None:
        self._client_id = client_id
        self._writes = writes
        self._last_forwarded = 0

    def handle(self, mail: bytes, lane: Lane) -> Handled:
        """Writes an extend, or hands it to control.

        Args:
            mail: A serialised ClientMessage.
            lane: The session's.
        """
        message = control_pb2.ClientMessage.FromString(mail)
        asked = message.extend
        claim = self._writes.find(asked) if self._last_forwarded < (asked.follows or message.request) else None
        content = None
        try:
            content = None if claim is None else _take_content(message, claim.get_layout(asked.num_rows), lane)
        except (TransportError, DeadlineExceededError) as error:
            lane.fail(error)
            reason = TransferAbortedError(transfer=message.request, reason=str(error))
            failed = control_pb2.ServerMessage(request=message.request, failure=encode_failure(reason))
            return Handled(failed.SerializeToString(), _make_report(message))
        if claim is None or content is None:
            return self._forward(message, mail)
        rows = self._extend(claim, message, content)
        if rows is None:  # control must have the content, which has left the channel
            asked.content.inline = content.numpy().tobytes()
            del asked.content.message_nbytes[:]
            return self._forward(message, message.SerializeToString())
        done = control_pb2.Done(indices=encode_rows(rows))
        answer = control_pb2.ServerMessage(request=message.request, done=done)
        return Handled(answer.SerializeToString(), _make_report(message))

    def _extend(self, claim: WorkerClaim, message: control_pb2.ClientMessage, content: torch.Tensor) -> Rows | None:
        extend = ClaimedRows(self._client_id, message.request, message.extend.num_rows)
        try:
            return claim.extend(extend, content)
        except Exception:  # noqa: BLE001 (control finds the record, if one was written, or stores the rows)
            _log.exception("rows of %r could not be written", message.extend.store)
            return None

    def _forward(self, message: control_pb2.ClientMessage, mail: bytes) -> Handled:
        self._last_forwarded = max(self._last_forwarded, message.request)
        return Handled(to_control=mail)


def _take_content(message: control_pb2.ClientMessage, layout: Layout, lane: Lane) -> torch.Tensor | None:
    """Returns the content of an extend, received if need be; None if this thread should not receive it.

    Raises:
        TransportError, DeadlineExceededError: It did not come.
    """
    content = message.extend.content
    nbytes = sum(layout.message_nbytes)
    if content.values_nbytes or content.values or nbytes > MAX_CLAIMED_BYTES:
        return None
    if content.HasField("inline"):
        check_inline(content, layout)
        return torch.frombuffer(bytearray(content.inline), dtype=torch.uint8)
    is_expected = tuple(content.message_nbytes) == layout.message_nbytes
    if not is_expected or message.channel != lane.channel_number or not lane.may_send_at_once:
        return None
    return lane.receive_at_once(make_tag(message.request), layout.message_nbytes)


def _make_report(message: control_pb2.ClientMessage) -> bytes:
    """Returns what control has to learn from a message that it does not get: which answers have arrived."""
    if not message.HasField("answered"):
        return b""
    return control_pb2.ClientMessage(answered=message.answered).SerializeToString()
