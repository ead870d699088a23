"""Who has gone of an epoch, and which calls that ends: the rule alone. No I/O, no clock.

A call of all begins with an agreement of all: who has *finished* the call of number n knows that every member has
begun it. A member that goes with nothing under way tells how many it has finished. With n or more of them, whoever is
in call n has all that it needs of it. With fewer, call n can never end: who is in it is let go at once, and who has not
begun it refuses. So nobody waits for one that refuses. A member that goes otherwise ends every call.
"""

from __future__ import annotations

from tdserve.v1 import control_pb2

Loss = control_pb2.GroupLoss


class Losses:
    """What one member knows of the others' going. Threads: none; the caller has a lock.

    Attributes:
        num_begun: Calls of all that this member has begun.
        num_finished: Those that have ended well; a refusal that all have agreed on is such an end.
        is_in_call: Whether one is under way, of all or of two.
    """

    def __init__(self) -> None:
        self.num_begun = 0
        self.num_finished = 0
        self.is_in_call = False
        self._is_of_all = False
        self._end: Loss | None = None
        self._left: dict[int, Loss] = {}

    @property
    def end(self) -> Loss | None:
        """What has ended the epoch for this member."""
        return self._end

    @property
    def is_any(self) -> bool:
        """Whether somebody has gone."""
        return self._end is not None or bool(self._left)

    def begin(self, peer: int | None) -> None:
        """A call begins; ``peer`` as of ``missed``."""
        self.is_in_call, self._is_of_all = True, peer is None
        self.num_begun += peer is None

    def finish(self, *, is_well: bool) -> None:
        """It has ended."""
        if is_well and self._is_of_all:
            self.num_finished = self.num_begun
        self.is_in_call = self._is_of_all = False

    def take(self, loss: Loss, *, ends_all: bool) -> bool:
        """Somebody has gone.

        Args:
            loss: As the server tells it.
            ends_all: Whether it ends the epoch even if nothing was under way.

        Returns:
            Whether it ends the epoch for this member: what is under way has to be let go.
        """
        if not (ends_all or not loss.has_left or self.ends_call(loss)):
            self._left.setdefault(loss.rank, loss)
            return False
        if self._end is None:
            self._end = loss
        return True

    def ends_call(self, loss: Loss) -> bool:
        """Whether who has gone cannot have done its part in the call of all under way."""
        return self._is_of_all and loss.HasField("num_finished") and loss.num_finished < self.num_begun

    def find_loss(self, peer: int | None) -> Loss | None:
        """Why a call that is to begin cannot.

        Args:
            peer: Rank of the only other member that it needs; None: it needs all.
        """
        if self._end is not None or not self._left:
            return self._end
        return next(iter(self._left.values())) if peer is None else self._left.get(peer)

    def cause(self, peer: int | None) -> Loss | None:
        """Why the call under way has failed, as far as this member was told; ``peer`` as of ``missed``."""
        if self._end is not None or not self._is_of_all:
            return self.find_loss(peer)
        return next((loss for loss in self._left.values() if self.ends_call(loss)), None)
