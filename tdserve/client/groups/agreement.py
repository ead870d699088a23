"""The agreement of members before content moves: that all make the same call, and that their structures fit.

Rank 0 receives the call of every member and sends the verdict to all. In a call of two members each receives the
other's call. A refusal reaches all of them, and the group continues. They exchange notes: short messages of any length,
first a page, then the rest if the note is longer.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tdserve.base.errors import (
    InvalidRequestError,
    RemoteProtocolError,
    SpecMismatchError,
    TDServeError,
    TransferAbortedError,
)
from tdserve.control.status import decode_failure, encode_failure
from tdserve.structure.trees import codec
from tdserve.structure.trees.tree import Spec
from tdserve.transport.group_content import CallChannel
from tdserve.transport.group_gloo import GroupWork
from tdserve.v1 import group_pb2

PAGE_BYTES = 512
"""Size of a note's first message: the description of a call fits, except for structures, which are sent once."""

MAX_NOTE_BYTES = 256 * 1024 * 1024
"""Largest note, the same as for gRPC's messages: specs of a hundred thousand leaves fit."""

_LENGTH = struct.Struct("<Q")
_ROOM_BYTES = PAGE_BYTES - _LENGTH.size


def post_note(channel: CallChannel, content: bytes, peers: Sequence[int]) -> list[GroupWork]:
    """Starts to send a note to each of some ranks."""
    page = bytearray(PAGE_BYTES)
    _LENGTH.pack_into(page, 0, len(content))
    page[_LENGTH.size : _LENGTH.size + min(len(content), _ROOM_BYTES)] = content[:_ROOM_BYTES]
    buffers = [torch.frombuffer(page, dtype=torch.uint8)]
    if len(content) > _ROOM_BYTES:
        buffers.append(torch.frombuffer(bytearray(content[_ROOM_BYTES:]), dtype=torch.uint8))
    return [channel.post(buffer, peer) for peer in peers for buffer in buffers]


def recv_notes(channel: CallChannel, peers: Sequence[int], sent: Sequence[GroupWork] = ()) -> list[bytes]:
    """Receives the next note of each of some ranks, in their order.

    Args:
        sent: Notes that are being sent, for which this waits too.

    Raises:
        PeerLostError, DeadlineExceededError: The channel is closed.
        RemoteProtocolError: The message is not a note.
    """
    pages = [torch.empty(PAGE_BYTES, dtype=torch.uint8) for _ in peers]
    channel.wait([*(channel.expect(page, peer) for page, peer in zip(pages, peers, strict=True)), *sent])
    notes, works = [], []
    for page, peer in zip(pages, peers, strict=True):
        content = page.numpy().tobytes()
        (nbytes,) = _LENGTH.unpack_from(content)
        if nbytes > MAX_NOTE_BYTES:
            raise RemoteProtocolError(expected=f"a note of at most {MAX_NOTE_BYTES} bytes", received=f"{nbytes}")
        rest = torch.empty(max(nbytes - _ROOM_BYTES, 0), dtype=torch.uint8)
        if nbytes > _ROOM_BYTES:
            works.append(channel.expect(rest, peer))
        notes.append((content[_LENGTH.size : _LENGTH.size + min(nbytes, _ROOM_BYTES)], rest))
    channel.wait(works)
    return [head + rest.numpy().tobytes() for head, rest in notes]


Check = Callable[[Spec], None]
"""Raises a TDServeError unless content of this structure fits what the member holds."""

ROOTED = ("broadcast", "scatter")
"""In these calls the structure of the root counts; in the others that of rank 0."""

MAX_KNOWN_SPECS = 256
"""Most specs that are kept for an epoch; a program uses a handful."""

ANSWERS = {"send": "recv", "recv": "send", "init_remote": "from_remote_init", "from_remote_init": "init_remote"}
"""The call that the other member must be making."""


@dataclass(frozen=True)
class Agreed:
    """The result of an agreement.

    Attributes:
        spec: The structure that counts, if any.
        values_nbytes: Size of the block of values that each rank sends; for a scatter, that each receives.
        failure: The error that every member raises; then nothing moves.
    """

    spec: Spec | None = None
    values_nbytes: Sequence[int] = ()
    failure: TDServeError | None = None


@dataclass
class Known:
    """Structures by fingerprint that were exchanged before in this epoch, each as it was sent last."""

    specs: dict[bytes, Spec]

    def learn(self, fingerprint: bytes, message: group_pb2.GroupCall | group_pb2.GroupVerdict) -> None:
        """Keeps the structure of a message.

        Every member receives the same ones in the same order, and so has the same.
        """
        if message.HasField("spec"):
            if len(self.specs) >= MAX_KNOWN_SPECS:
                self.specs.clear()
            self.specs[fingerprint] = codec.decode(message.spec)

    def get(self, fingerprint: bytes) -> Spec:
        """Returns a structure. Raises RemoteProtocolError if it was never exchanged."""
        spec = self.specs.get(fingerprint)
        if spec is None:
            raise RemoteProtocolError(expected="a structure that was sent before", received=fingerprint.hex())
        return spec


def describe_structure(call: group_pb2.GroupCall, spec: Spec, fingerprint: bytes, known: Known) -> None:
    """Puts a member's structure into its call; the whole structure if it was not sent before, or last with its keys in
    another order, which a fingerprint does not tell."""
    call.fingerprint = fingerprint
    before = known.specs.get(fingerprint)
    if before is not spec and before != spec:
        call.spec.CopyFrom(codec.encode(spec))


def meet(channel: CallChannel) -> None:
    """Waits until every member has called this.

    Raises:
        PeerLostError, DeadlineExceededError: The channel is closed.
    """
    if channel.rank == 0:
        others = range(1, channel.world_size)
        recv_notes(channel, others)
        channel.wait(post_note(channel, b"", others))
    else:
        recv_notes(channel, [0], post_note(channel, b"", [0]))


def agree(
    channel: CallChannel, call: group_pb2.GroupCall, *, known: Known, check: Check | None, own: TDServeError | None
) -> Agreed:
    """Agrees on a call of all members.

    Args:
        channel: Channel of the call.
        call: What this member is about to do.
        known: Structures that were exchanged in this epoch.
        check: Compares the structure that counts with this member's, if the fingerprints differ.
        own: Why this member cannot take part.

    Raises:
        PeerLostError, DeadlineExceededError: The channel is closed.
    """
    rank, size = channel.rank, channel.world_size
    others = range(1, size)
    if own is not None:
        call.failure.CopyFrom(encode_failure(own))
    if rank == 0:
        notes = recv_notes(channel, others)
        calls = [call, *(group_pb2.GroupCall.FromString(note) for note in notes)]
        verdict = judge_calls(calls)
        sent = post_note(channel, verdict.SerializeToString(), others)
        if verdict.examines:
            own = _examine(verdict, known, check)
            notes = recv_notes(channel, others, sent)
            failures = [_make_result(own), *(group_pb2.GroupCall.FromString(note) for note in notes)]
            verdict = find_failure(failures) or group_pb2.GroupVerdict(
                fingerprint=verdict.fingerprint, values_nbytes=verdict.values_nbytes
            )
            sent = post_note(channel, verdict.SerializeToString(), others)
        channel.wait(sent)
    else:
        sent = post_note(channel, call.SerializeToString(), [0])
        verdict = group_pb2.GroupVerdict.FromString(recv_notes(channel, [0], sent)[0])
        if verdict.examines:
            own = _examine(verdict, known, check)
            sent = post_note(channel, _make_result(own).SerializeToString(), [0])
            verdict = group_pb2.GroupVerdict.FromString(recv_notes(channel, [0], sent)[0])
    known.learn(verdict.fingerprint, verdict)
    if verdict.HasField("failure"):
        return Agreed(failure=_make_member_error(verdict, own, rank))
    spec = known.get(verdict.fingerprint) if verdict.fingerprint else None
    return Agreed(spec, list(verdict.values_nbytes))


def agree_pair(
    channel: CallChannel,
    peer: int,
    call: group_pb2.GroupCall,
    *,
    sent_specs: Known,
    received_specs: Known,
    check: Check | None,
    own: TDServeError | None,
) -> Agreed:
    """Agrees on a call of two members; the structure is that of the sender.

    Args:
        channel: Channel of the call.
        peer: The other member's rank.
        call: What this member is about to do.
        sent_specs: Structures that this member has sent to the other.
        received_specs: Structures that the other member has sent.
        check: As for ``agree``, at the receiver; None: this member sends.
        own: As for ``agree``.

    Raises:
        PeerLostError, DeadlineExceededError: The channel is closed.
    """
    if own is not None:
        call.failure.CopyFrom(encode_failure(own))
    sent = post_note(channel, call.SerializeToString(), [peer])
    other = group_pb2.GroupCall.FromString(recv_notes(channel, [peer], sent)[0])
    sent_specs.learn(call.fingerprint, call)
    received_specs.learn(other.fingerprint, other)
    if other.kind != ANSWERS[call.kind]:
        reason = f"rank {peer} calls {_describe_call(other)}, rank {channel.rank} {_describe_call(call)}"
        return Agreed(failure=own or InvalidRequestError(argument="call of two members", reason=reason))
    if own is not None or other.HasField("failure"):
        verdict = group_pb2.GroupVerdict(failure=other.failure, rank=peer)
        return Agreed(failure=_make_member_error(verdict, own, channel.rank))
    giver, taker = (call, other) if check is None else (other, call)
    spec = (sent_specs if check is None else received_specs).get(giver.fingerprint)
    if taker.fingerprint not in (b"", giver.fingerprint):
        if check is not None:
            own = _check_spec(check, spec)
            channel.wait(post_note(channel, _make_result(own).SerializeToString(), [peer]))
        else:
            result = group_pb2.GroupCall.FromString(recv_notes(channel, [peer])[0])
            verdict = group_pb2.GroupVerdict(failure=result.failure, rank=peer)
            own = _make_member_error(verdict, None, channel.rank) if result.HasField("failure") else None
        if own is not None:
            return Agreed(failure=own)
    return Agreed(spec, [*giver.values_nbytes])


def judge_calls(calls: Sequence[group_pb2.GroupCall]) -> group_pb2.GroupVerdict:
    """Returns the verdict on the calls of all members, by rank."""
    first = calls[0]
    failed = find_failure(calls)
    if failed is not None:
        return failed
    for rank, call in enumerate(calls):
        if (call.kind, call.root, call.op, call.number) != (first.kind, first.root, first.op, first.number):
            reason = f"rank {rank} calls {_describe_call(call)}, rank 0 {_describe_call(first)}"
            error = InvalidRequestError(argument="call of all members", reason=reason)
            return group_pb2.GroupVerdict(failure=encode_failure(error), rank=rank)
    chosen = calls[first.root if first.kind in ROOTED else 0]
    sizes = [*chosen.values_nbytes] if first.kind == "scatter" else [sum(call.values_nbytes) for call in calls]
    verdict = group_pb2.GroupVerdict(fingerprint=chosen.fingerprint, values_nbytes=sizes)
    if chosen.HasField("spec"):
        verdict.spec.CopyFrom(chosen.spec)
    verdict.examines = any(call.fingerprint not in (b"", chosen.fingerprint) for call in calls)
    return verdict


def find_failure(calls: Sequence[group_pb2.GroupCall]) -> group_pb2.GroupVerdict | None:
    """Returns the verdict if a member cannot take part, else None."""
    for rank, call in enumerate(calls):
        if call.HasField("failure"):
            return group_pb2.GroupVerdict(failure=call.failure, rank=rank)
    return None


def _examine(verdict: group_pb2.GroupVerdict, known: Known, check: Check | None) -> TDServeError | None:
    known.learn(verdict.fingerprint, verdict)
    return None if check is None else _check_spec(check, known.get(verdict.fingerprint))


def _check_spec(check: Check, spec: Spec) -> TDServeError | None:
    try:
        check(spec)
    except TDServeError as error:
        return error
    return None


def _make_result(error: TDServeError | None) -> group_pb2.GroupCall:
    return group_pb2.GroupCall() if error is None else group_pb2.GroupCall(failure=encode_failure(error))


def _make_member_error(verdict: group_pb2.GroupVerdict, own: TDServeError | None, rank: int) -> TDServeError:
    """Returns the error that a member raises after a refusal: its own, or one that names the member at fault."""
    if own is not None:
        return own
    error = decode_failure(verdict.failure)
    if verdict.rank == rank or (isinstance(error, InvalidRequestError) and error.argument == "call of all members"):
        return error
    if isinstance(error, SpecMismatchError):
        return SpecMismatchError(**{**error.fields, "actual": f"{error.actual} at rank {verdict.rank}"})
    return TransferAbortedError(transfer=0, reason=f"rank {verdict.rank} cannot take part: {error}")


def _describe_call(call: group_pb2.GroupCall) -> str:
    arguments = [f"op={call.op!r}"] if call.op else []
    if call.kind in ("broadcast", "scatter", "gather"):
        arguments.append(f"{'dst' if call.kind == 'gather' else 'src'}={call.root}")
    return f"{call.kind}({', '.join(arguments)}) as number {call.number}" if call.number else f"{call.kind}()"
