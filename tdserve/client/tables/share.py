"""Shares of data-parallel readers: which part of which draw a call asks for, and the counts of callers that name no
step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any

from tdserve.base.errors import InvalidRequestError
from tdserve.base.integers import check_integer
from tdserve.structure.tree import Path
from tdserve.v1 import control_pb2

MAX_STEP = (1 << 63) - 1


@dataclass(frozen=True)
class Share:
    """The part of one rank in the draw of one step.

    Attributes:
        rank, world_size, step: As given by the caller.
        balance: Leaf by whose sizes the rows are dealt; None: in turn.
    """

    rank: int
    world_size: int
    step: int
    balance: Path | None = None

    def make_message(self) -> control_pb2.RankShare:
        """Returns it as a message."""
        message = control_pb2.RankShare(rank=self.rank, world_size=self.world_size, step=self.step)
        if self.balance is not None:
            message.balance.parts.extend(self.balance)
        return message

    def move_to(self, step: int) -> Share:
        """Returns the part of the same rank in another step."""
        return replace(self, step=step)


def parse_share(rank: Any, world_size: Any, step: Any, balance: Path | None) -> Share | None:
    """Returns the share that a caller asks for, of step 0 where it names none; None if it asks for no share.

    Raises:
        InvalidRequestError: An argument is invalid, or comes without ``rank`` and ``world_size``.
    """
    if rank is None or world_size is None:
        given = {"rank": rank, "world_size": world_size, "step": step, "balance": balance}
        named = [name for name, value in given.items() if value is not None]
        if named:
            raise InvalidRequestError(argument=named[0], reason="it needs both rank and world_size")
        return None
    world_size = check_integer("world_size", world_size, 1)
    rank = check_integer("rank", rank, 0, maximum=world_size - 1)
    return Share(rank, world_size, check_integer("step", 0 if step is None else step, 0, maximum=MAX_STEP), balance)


class StepCounts:
    """Counts the steps of callers that name none, for each rank and number of ranks. Threads: safe."""

    def __init__(self) -> None:
        self._next: dict[tuple[int, int], int] = {}
        self._lock = Lock()

    @contextmanager
    def take(self, share: Share) -> Iterator[Share]:
        """A block with the next step of a share, which the next call gets again if the block raises."""
        name = (share.rank, share.world_size)
        with self._lock:
            step = self._next.get(name, 0)
            self._next[name] = step + 1
        try:
            yield share.move_to(step)
        except BaseException:
            with self._lock:
                if self._next[name] == step + 1:
                    self._next[name] = step
            raise
