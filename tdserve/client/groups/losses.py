"""Which members of an epoch have left, and which calls that ends: only the rule, no I/O, no clock.

A call of all members begins with an agreement of all. So a member that has *finished* call number n knows that every
member has begun it. A member that leaves between calls reports how many it has finished. If it finished n or more, the
others in call n have all that they need of it. If fewer, call n can never end: members in it are released at once, and
members that have not begun it refuse it. So none waits for one that refuses. A member that leaves in any other way ends
every call.
"""

from __future__ import annotations

from tdserve.v1 import control_pb2

Loss = control_pb2.GroupLoss


class Losses:
    """The losses of other members, as one member has learned of them. Threads: not safe; the caller needs a lock.

    Attributes:
        num_begun: Calls of all that this member has begun.
        num_finished: Calls that ended well; a refusal that all have agreed on counts too.
        is_in_call: Whether a call is under way, of all or of two members.
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
        """The loss that has ended the epoch for this member."""
        return self._end

    @property
    def is_any(self) -> bool:
        """Whether any member has left."""
        return self._end is not None or bool(self._left)

    def begin(self, peer: int | None) -> None:
        """Notes that a call begins; ``peer`` as for ``find_loss``."""
        self.is_in_call, self._is_of_all = True, peer is None
        self.num_begun += peer is None

    def finish(self, *, is_well: bool) -> None:
        """Notes that the call has ended."""
        if is_well and self._is_of_all:
            self.num_finished = self.num_begun
        self.is_in_call = self._is_of_all = False

    def take(self, loss: Loss, *, ends_all: bool) -> bool:
        """Notes that a member has left.

        Args:
            loss: As reported by the server.
            ends_all: Whether it ends the epoch even if no call was under way.

        Returns:
            Whether it ends the epoch for this member: then a call under way must be released.
        """
        if not (ends_all or not loss.has_left or self.is_end_of_call(loss)):
            self._left.setdefault(loss.rank, loss)
            return False
        if self._end is None:
            self._end = loss
        return True

    def is_end_of_call(self, loss: Loss) -> bool:
        """Returns whether a lost member cannot have done its part in the call of all members under way."""
        return self._is_of_all and loss.HasField("num_finished") and loss.num_finished < self.num_begun

    def find_loss(self, peer: int | None) -> Loss | None:
        """Returns the loss that prevents a call from beginning.

        Args:
            peer: Rank of the only other member that the call needs; None: it needs all.
        """
        if self._end is not None or not self._left:
            return self._end
        return next(iter(self._left.values())) if peer is None else self._left.get(peer)

    def find_cause(self, peer: int | None) -> Loss | None:
        """Returns the loss that made the call under way fail, as far as it is known; ``peer`` as for ``find_loss``."""
        if self._end is not None or not self._is_of_all:
            return self.find_loss(peer)
        return next((loss for loss in self._left.values() if self.is_end_of_call(loss)), None)
