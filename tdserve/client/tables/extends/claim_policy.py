"""When the extends of a handle ask for a claim and use it: a writer that keeps writing asks for rows once.

``server/README.md`` has a reading order of claims.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from threading import Lock
from typing import NamedTuple

import torch

from tdserve.base.errors import LocalProtocolError, TDServeError, TransportError
from tdserve.client.local.local_claim import LocalClaim
from tdserve.client.session.requests.outgoing import WriteTarget
from tdserve.client.session.session import Session
from tdserve.client.session.session_client import SessionClient
from tdserve.rules.replay.allocation.claim_pacing import MIN_EXTENDS, ClaimPacing
from tdserve.rules.replay.settings import Settings
from tdserve.structure.captures.capture import Captured
from tdserve.v1 import control_pb2

AHEAD = 32
"""Extends that a writer may be ahead of the server."""

AHEAD_ROWS = 1 << 14
"""Rows that these extends may have together: the server commits at once what it finds, which takes milliseconds. An
extend of more than half as many is requested by itself."""


class _ClaimStage(Enum):
    IMPOSSIBLE = "impossible"  # the table allows no claims, or this process cannot use them
    NONE = "without a claim"  # the server is asked for rows, and each extend counts until the next request for a claim
    REQUESTED = "requested"
    CLAIMED = "claimed"


_NEXT_STAGES = {
    _ClaimStage.IMPOSSIBLE: (),
    _ClaimStage.NONE: (_ClaimStage.REQUESTED,),
    _ClaimStage.REQUESTED: (_ClaimStage.NONE, _ClaimStage.CLAIMED, _ClaimStage.IMPOSSIBLE),
    _ClaimStage.CLAIMED: (_ClaimStage.NONE,),
}


@dataclass
class ClaimRequest:
    """A request for a claim, which is sent together with an extend.

    Attributes:
        num_rows: Rows that the writer asks for in advance.
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
    """

    def __init__(self, client: SessionClient, target: WriteTarget, settings: Settings) -> None:
        self._client = client
        self._target = target
        spec = target.stored
        has_tensors_only = spec is not None and bool(spec.tensors) and not spec.values
        self._lock = Lock()
        self._stage = _ClaimStage.NONE if settings.is_plain_ring and has_tensors_only else _ClaimStage.IMPOSSIBLE
        self._claim: LocalClaim | None = None
        self._pacing = ClaimPacing()

    def follow(self, target: WriteTarget) -> None:
        """Continues with the structure that the table has now; claims are of one structure."""
        with self._lock:
            self._target = target
            if self._claim is not None:
                self._claim = None
                self._enter(_ClaimStage.NONE)

    @property
    def is_awaiting_claim(self) -> bool:
        """Whether the answer to a claim request is awaited. An extend sent before it arrives would end the claim."""
        return self._stage is _ClaimStage.REQUESTED

    def extend(self, captured: Sequence[Captured]) -> torch.Tensor | UnknownOutcome | None:
        """Writes rows without annotations into claimed rows, without asking the server.

        Returns:
            Their numbers; None if the server must be asked; or how to continue after the session was lost.
        """
        claim = self._claim
        if claim is None or any(each.is_in_files for each in captured):
            return None
        number = self._client.requests.begin_change()
        try:
            rows = claim.extend(number, captured)
        except TransportError:
            self._drop(claim)
            self._client.requests.note_sent(number)  # by what the claim's file has of it
            return UnknownOutcome(number)
        except BaseException:
            self._drop(claim)
            self._client.requests.end(number)
            raise
        self._client.requests.end(number)
        if rows is None:
            self._drop(claim, has_ended=True)
            return None
        return torch.from_numpy(rows)

    def compute_wish(self, num_rows: int) -> int:
        """Returns how many rows this client's worker may claim for extends of this many rows each; 0: none."""
        return min(AHEAD * num_rows, AHEAD_ROWS) if self._may_claim(num_rows) else 0

    def _may_claim(self, num_rows: int) -> bool:
        return self._stage is not _ClaimStage.IMPOSSIBLE and 2 * num_rows <= AHEAD_ROWS

    def make_claim_request(self, num_rows: int) -> ClaimRequest | None:
        """Returns the claim request to send with an extend of this many rows; None to send none."""
        movers = self._client.movers
        if movers is None or not movers.writes.takes_claims or not self._may_claim(num_rows):
            return None
        with self._lock:
            if self._stage is not _ClaimStage.NONE or not self._pacing.count_extend():
                return None
            self._enter(_ClaimStage.REQUESTED)
        return ClaimRequest(self.compute_wish(num_rows))

    def take_answer(self, claim_request: ClaimRequest, done: control_pb2.Done | None) -> None:
        """Receives the answer to an extend that requested a claim; None if it failed."""
        session, stored = claim_request.session, self._target.stored
        if done is None or session is None or stored is None or not done.HasField("claim"):
            with self._lock:
                self._pacing.on_refused()
                self._enter(_ClaimStage.NONE)
            return
        claim, stage = None, _ClaimStage.NONE
        try:
            claim, stage = session.movers.writes.open_claim(self._target.store, stored, done.claim), _ClaimStage.CLAIMED
        except TransportError:
            pass  # the session is over
        except TDServeError:  # the server reclaims it when it is asked for rows
            stage = _ClaimStage.IMPOSSIBLE
        with self._lock:
            self._pacing.on_granted()
            self._claim = claim  # first: who sees the new stage must see it
            self._enter(stage)

    def _drop(self, claim: LocalClaim, *, has_ended: bool = False) -> None:
        """Uses a claim no more, because it has ended, or was lost."""
        with self._lock:
            if self._claim is not claim:  # another thread was faster
                return
            self._claim = None
            self._enter(_ClaimStage.NONE)
            if has_ended:
                was_worth_it = claim.is_exhausted or claim.num_extends >= MIN_EXTENDS
                self._pacing.on_ended(was_worth_it=was_worth_it, is_next_due=claim.is_exhausted)

    def _enter(self, stage: _ClaimStage) -> None:
        if stage not in _NEXT_STAGES[self._stage]:
            raise LocalProtocolError(reason=f"a claim that is {self._stage.value} cannot become {stage.value}")
        self._stage = stage
