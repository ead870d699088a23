"""What the ranks of a gloo group prove to each other before one of them believes a byte: that all know one secret.

gloo tells connections apart by a number that it counts upwards, and takes whoever comes first for the peer. So each
pair of ranks challenges one another over its fresh connection. The secret comes over the authenticated sessions and
never crosses the connection itself.

Three messages of 32 bytes go each way: a nonce, a proof, and a confirmation that is sent once all proofs of all ranks
were right. The confirmations make all ranks fail together, so that all of them try again.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import secrets
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch

from tdserve.base.errors import RemoteProtocolError
from tdserve.base.ids import SECRET_BYTES

MESSAGE_BYTES = 32
"""Of a nonce, and of an HMAC with SHA-256."""

PROOF_TAG = 2**31 - 1
"""Nothing else is under way on a pair that proves itself; only the tag that closes a pair must be another one."""

_PROVES, _CONFIRMS = 1, 2
_HEAD = struct.Struct("<IIIII")
"""Step, attempt, size of the group, rank of the sender, rank of the receiver."""


class UnprovenError(RuntimeError):
    """Whoever is at the other end has given a wrong proof. It does not leave ``transport``."""


@dataclass(frozen=True)
class Bond:
    """What makes the ends of a group belong together; equal at all of them.

    Attributes:
        secret: Known to nobody else.
        purpose: Of the group, such as ``"session 7 mail"``: two groups with one secret prove different things.

    Raises:
        RemoteProtocolError: The secret has another length: whoever sent it sent none.
    """

    secret: bytes
    purpose: str

    def __post_init__(self) -> None:
        if len(self.secret) != SECRET_BYTES:
            expected, received = f"a secret of {SECRET_BYTES} bytes", f"{len(self.secret)} bytes"
            raise RemoteProtocolError(expected=expected, received=received)

    def narrowed(self, part: str) -> Bond:
        """That of another group of the same ends."""
        return replace(self, purpose=f"{self.purpose} {part}")

    def digest(self, head: bytes, sender_nonce: bytes, receiver_nonce: bytes) -> bytes:
        """What only one who knows the secret can say, at this step, to this receiver, after these nonces."""
        said = head + sender_nonce + receiver_nonce + self.purpose.encode()
        return hmac.digest(self.secret, said, hashlib.sha256)


def session_bond(secret: bytes, session: int, *, is_mail: bool = False, channel_number: int = 0) -> Bond:
    """That of a session's group for mail, or of one of its groups for content."""
    bond = Bond(secret, f"session {session} {'mail' if is_mail else 'content'}")
    return bond.narrowed(f"channel {channel_number}") if channel_number else bond


def link_bond(secret: bytes, link: int) -> Bond:
    """That of two clients who pass a version on."""
    return Bond(secret, f"link {link}")


def epoch_bond(secret: bytes, group: str, epoch: int) -> Bond:
    """That of an epoch of a group of clients."""
    return Bond(secret, f"epoch {epoch} of {group}")


def prove(group: Any, rank: int, world_size: int, bond: Bond, *, attempt: int, timeout_s: float) -> None:
    """Proves this rank to all others, and has all of them prove themselves.

    Args:
        group: The process group; nothing was sent over it.
        rank: This one's.
        world_size: Ranks of the group.
        bond: Of the group.
        attempt: How many groups were formed before this one, for the same purpose.
        timeout_s: For all of it.

    Raises:
        UnprovenError: Somebody said something else. The caller must close the group.
        RuntimeError: Somebody said nothing in time, or went away; likewise.
    """
    others = [other for other in range(world_size) if other != rank]
    end_s = time.monotonic() + timeout_s
    mine = {other: secrets.token_bytes(MESSAGE_BYTES) for other in others}
    theirs = exchange(group, mine, end_s)

    def said(step: int, sender: int, receiver: int) -> bytes:
        nonces = (mine[receiver], theirs[receiver]) if sender == rank else (theirs[sender], mine[sender])
        return bond.digest(_HEAD.pack(step, attempt, world_size, sender, receiver), *nonces)

    for step in (_PROVES, _CONFIRMS):
        _check(exchange(group, {other: said(step, rank, other) for other in others}, end_s), rank, step, said)


def _check(heard: Mapping[int, bytes], rank: int, step: int, said: Callable[[int, int, int], bytes]) -> None:
    for other, answer in heard.items():
        if not hmac.compare_digest(answer, said(step, other, rank)):
            raise UnprovenError(f"it is not rank {other}: its proof is wrong")


def exchange(group: Any, told: Mapping[int, bytes], end_s: float) -> dict[int, bytes]:
    """Sends a message of ``MESSAGE_BYTES`` to each rank, and returns those that came from them.

    Raises:
        RuntimeError: As gloo does: not all of it happened in time, or a connection broke.
    """
    heard = {other: torch.zeros(MESSAGE_BYTES, dtype=torch.uint8) for other in told}
    sent = {other: torch.frombuffer(bytearray(message), dtype=torch.uint8) for other, message in told.items()}
    works = [group.recv([buffer], other, PROOF_TAG) for other, buffer in heard.items()]
    works += [group.send([buffer], other, PROOF_TAG) for other, buffer in sent.items()]
    for work in works:
        timeout_ms = max(math.ceil((end_s - time.monotonic()) * 1000), 1)
        work.wait(timedelta(milliseconds=timeout_ms))
    return {other: buffer.numpy().tobytes() for other, buffer in heard.items()}
