"""When the extends of a handle ask for a claim and use it: a writer that keeps writing asks for rows once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tdserve.base.errors import TDServeError, TransportError
from tdserve.client.local.local_claim import LocalClaim
from tdserve.client.session.outgoing import WriteTarget
from tdserve.client.session.session import Session
from tdserve.client.session.session_client import SessionClient
from tdserve.rules.replay.settings import Settings
from tdserve.structure.capture import Captured
from tdserve.v1 import control_pb2

FIRST_CLAIM_EXTENDS = 4
"""Extends of a handle before it counts as a writer that keeps writing."""

MAX_PAUSE = 4096
"""Most extends between two requests for a claim, where other writers end claims before they are worth it."""

MIN_EXTENDS = 8
"""A claim was worth it if it was used this often."""

AHEAD = 32
"""Extends that a writer may be ahead of the server."""

AHEAD_ROWS = 1 << 14
"""Rows that these extends may have together: the server commits at once what it finds, which takes milliseconds. An
extend of more than half as many is requested by itself."""


@dataclass
class ClaimRequest:
    """A request for a claim, which is sent together with an extend.

    Attributes:
        num_rows: Rows that the writer wants in advance.
        session: The session that sent it last.
    """

    num_rows: int
    session: Session | None = None


class UnknownOutcome(NamedTuple):
    """It is unknown whether the rows of an extend are stored; a retry under its request number stores them once.

    Attributes:
        request: The request number.
    """

    request: int


class ClaimPolicy:
    """The claims of one handle. Threads: safe.

    Args:
        client: Whose extends they are.
        target: The table.
        settings: Its rules. A table that decides more about an extend than its row numbers allows no claims.

    Attributes:
        is_awaiting_claim: Whether the answer to a claim request is awaited. An extend sent before it arrives would end
            the claim.
    """

    def __init__(self, client: SessionClient, target: WriteTarget, settings: Settings) -> None:
        self._client = client
        self._target = target
        spec = target.stored
        has_tensors_only = spec is not None and bool(spec.tensors) and not spec.values
        self._is_possible = settings.is_plain_ring and has_tensors_only
        self._claim: LocalClaim | None = None
        self._num_left = FIRST_CLAIM_EXTENDS  # extends until the next request for a claim
        self._pause = FIRST_CLAIM_EXTENDS
        self.is_awaiting_claim = False

    def extend(self, captured: Sequence[Captured]) -> torch.Tensor | UnknownOutcome | None:
        """Writes rows without annotations into claimed rows, without asking the server.

        Returns:
            Their numbers; None if the server must be asked; or how to go on after the session was lost.
        """
        claim = self._claim
        if claim is None or any(each.is_in_files for each in captured):
            return None
        number = self._client.requests.begin_change()
        try:
            rows = claim.extend(number, captured)
        except TransportError:
            self._claim = None
            return UnknownOutcome(number)
        except BaseException:
            self._claim = None
            self._client.requests.end(number)
            raise
        self._client.requests.end(number)
        if rows is None:
            self._end(claim)
            return None
        return torch.from_numpy(rows)

    def compute_wish(self, num_rows: int) -> int:
        """Returns how many rows this client's worker may claim for extends of so many rows each; 0: none."""
        return min(AHEAD * num_rows, AHEAD_ROWS) if self._may_claim(num_rows) else 0

    def _may_claim(self, num_rows: int) -> bool:
        return self._is_possible and 2 * num_rows <= AHEAD_ROWS

    def make_claim_request(self, num_rows: int) -> ClaimRequest | None:
        """Returns the claim request to send with an extend of so many rows; None to send none."""
        if not self._may_claim(num_rows) or self._claim is not None or self.is_awaiting_claim:
            return None
        mover = self._client.mover
        if mover is None or not mover.takes_claims:
            return None
        self._num_left -= 1
        if self._num_left > 0:
            return None
        self.is_awaiting_claim = True
        return ClaimRequest(self.compute_wish(num_rows))

    def take_answer(self, claim_request: ClaimRequest, done: control_pb2.Done | None) -> None:
        """Receives the answer to an extend that requested a claim; None if it failed."""
        session, stored = claim_request.session, self._target.stored
        self._num_left = self._pause
        if done is None or session is None or stored is None or not done.HasField("claim"):
            self._pause = min(2 * self._pause, MAX_PAUSE)
        else:
            try:
                self._claim = session.mover.open_claim(self._target.store, stored, done.claim)
            except TransportError:
                pass  # the session is over
            except TDServeError:  # the server reclaims it when it is asked for rows
                self._is_possible = False
        self.is_awaiting_claim = False

    def _end(self, claim: LocalClaim) -> None:
        self._claim = None
        if claim.is_exhausted or claim.num_extends >= MIN_EXTENDS:
            self._pause = FIRST_CLAIM_EXTENDS
        else:
            self._pause = min(2 * self._pause, MAX_PAUSE)
        self._num_left = 1 if claim.is_exhausted else self._pause
