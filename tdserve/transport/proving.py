"""The proof that all ranks of a gloo group know one secret, before any of them trusts a byte.

gloo distinguishes connections by a number that it counts upwards, and takes the first one for the peer. So each pair of
ranks exchanges challenges over its fresh connection. The secret comes over the authenticated sessions and never crosses
the connection itself.

Two messages of 32 bytes go each way: a nonce and a proof. Each rank then tells the others over the sessions whether it
has the proofs of all (``proven``).
"""

from __future__ import annotations

import hashlib
import hmac
import math
import secrets
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch

from tdserve.base.errors import RemoteProtocolError
from tdserve.base.ids import SECRET_BYTES

MESSAGE_BYTES = 32
"""Length of a nonce, and of an HMAC with SHA-256."""

PROOF_TAG = 2**31 - 1
"""During the proof nothing else is under way on a pair; only the tag that closes a pair must be different."""

_HEAD = struct.Struct("<IIII")
"""Attempt, size of the group, rank of the sender, rank of the receiver."""


class UnprovenError(RuntimeError):
    """The other end has given a wrong proof. This error does not leave ``transport``."""


@dataclass(frozen=True)
class ChannelCredential:
    """The secret and purpose by which the ends of a gloo group authenticate each other.

    Attributes:
        secret: Known only to them.
        purpose: Purpose of the group, such as ``"session 7 mail"``: two groups with one secret prove different things.

    Raises:
        RemoteProtocolError: The secret has another length: the sender sent none.
    """

    secret: bytes
    purpose: str

    def __post_init__(self) -> None:
        if len(self.secret) != SECRET_BYTES:
            expected, received = f"a secret of {SECRET_BYTES} bytes", f"{len(self.secret)} bytes"
            raise RemoteProtocolError(expected=expected, received=received)

    def narrow(self, part: str) -> ChannelCredential:
        """Returns the credential of another group of the same ends."""
        return replace(self, purpose=f"{self.purpose} {part}")

    def compute_digest(self, head: bytes, sender_nonce: bytes, receiver_nonce: bytes) -> bytes:
        """Returns what only a process with the secret can compute, for this receiver, after these nonces."""
        proven = head + sender_nonce + receiver_nonce + self.purpose.encode()
        return hmac.digest(self.secret, proven, hashlib.sha256)


def make_session_credential(
    secret: bytes, session: int, *, is_mail: bool = False, channel_number: int = 0
) -> ChannelCredential:
    """Returns the credential of a session's group for mail, or of one of its groups for content."""
    credential = ChannelCredential(secret, f"session {session} {'mail' if is_mail else 'content'}")
    return credential.narrow(f"channel {channel_number}") if channel_number else credential


def make_hop_credential(secret: bytes, hop: int) -> ChannelCredential:
    """Returns the credential of two clients between which a version is passed on."""
    return ChannelCredential(secret, f"hop {hop}")


def make_epoch_credential(secret: bytes, group: str, epoch: int) -> ChannelCredential:
    """Returns the credential of an epoch of a group of clients."""
    return ChannelCredential(secret, f"epoch {epoch} of {group}")


def prove(
    group: Any, rank: int, world_size: int, credential: ChannelCredential, *, attempt: int, timeout_s: float
) -> None:
    """Proves this rank to all others, and checks the proofs of all others.

    Args:
        group: The process group; nothing was sent over it yet.
        rank: This rank.
        world_size: Number of ranks.
        credential: Secret and purpose of the group.
        attempt: Number of groups that were formed before this one for the same purpose.
        timeout_s: Seconds for everything.

    Raises:
        UnprovenError: A rank sent something else. The caller must close the group.
        RuntimeError: A rank sent nothing in time, or went away; likewise.
    """
    others = [other for other in range(world_size) if other != rank]
    end_s = time.monotonic() + timeout_s
    mine = {other: secrets.token_bytes(MESSAGE_BYTES) for other in others}
    theirs = exchange(group, mine, end_s)

    def compute_proof(sender: int, receiver: int) -> bytes:
        nonces = (mine[receiver], theirs[receiver]) if sender == rank else (theirs[sender], mine[sender])
        return credential.compute_digest(_HEAD.pack(attempt, world_size, sender, receiver), *nonces)

    for other, proof in exchange(group, {other: compute_proof(rank, other) for other in others}, end_s).items():
        if not hmac.compare_digest(proof, compute_proof(other, rank)):
            raise UnprovenError(f"it is not rank {other}: its proof is wrong")


def exchange(group: Any, messages: Mapping[int, bytes], end_s: float) -> dict[int, bytes]:
    """Sends a message of ``MESSAGE_BYTES`` to each rank, and returns the messages of the others.

    Raises:
        RuntimeError: gloo's error: some messages were not exchanged in time, or a connection broke.
    """
    received = {other: torch.zeros(MESSAGE_BYTES, dtype=torch.uint8) for other in messages}
    sent = {other: torch.frombuffer(bytearray(message), dtype=torch.uint8) for other, message in messages.items()}
    works = [group.recv([buffer], other, PROOF_TAG) for other, buffer in received.items()]
    works += [group.send([buffer], other, PROOF_TAG) for other, buffer in sent.items()]
    for work in works:
        timeout_ms = max(math.ceil((end_s - time.monotonic()) * 1000), 1)
        work.wait(timedelta(milliseconds=timeout_ms))
    return {other: buffer.numpy().tobytes() for other, buffer in received.items()}
