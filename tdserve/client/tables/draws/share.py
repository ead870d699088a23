"""Shares of data-parallel readers: which part of which draw a call asks for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

from tdserve.base.deadline import Deadline
from tdserve.base.errors import InvalidRequestError
from tdserve.base.integers import check_integer
from tdserve.base.torchrun_rank import read_run_id
from tdserve.client.handles.key_paths import check_path
from tdserve.rules.replay.draws.kept_draw import MAX_RUN_BYTES
from tdserve.structure.trees.tree import Path
from tdserve.v1 import control_pb2

MAX_STEP = (1 << 63) - 1


@dataclass(frozen=True)
class Share:
    """The part of one rank in the draw of one step.

    Attributes:
        rank, world_size, step: As given by the caller.
        balance: Leaf by whose sizes the rows are dealt; None: in turn.
        is_named: Whether the caller named the step.
        run: Name of the job.
    """

    rank: int
    world_size: int
    step: int
    balance: Path | None = None
    is_named: bool = True
    run: str = ""

    def make_message(self) -> control_pb2.RankShare:
        """Returns it as a message."""
        message = control_pb2.RankShare(rank=self.rank, world_size=self.world_size, step=self.step, run=self.run)
        if self.balance is not None:
            message.balance.parts.extend(self.balance)
        return message

    def move_to(self, step: int) -> Share:
        """Returns the part of the same rank in another step."""
        return replace(self, step=step)

    def check_balance(self, table: HasKeys, deadline: Deadline) -> None:
        """Raises KeyNotFoundError if the rows of a table have no key ``balance``."""
        if self.balance is not None:
            table.check_key(self.balance, deadline)


class HasKeys(Protocol):
    """A table, of one server or of several."""

    def check_key(self, path: Path, deadline: Deadline) -> None:
        """Raises KeyNotFoundError if rows have no leaf or nested part of this path."""


def parse_share(rank: Any, world_size: Any, step: Any, balance: Any, run: Any = None) -> Share | None:
    """Returns the share that a caller asks for, of step 0 where it names none; None if it asks for no share.

    Raises:
        InvalidRequestError: An argument is invalid, or comes without ``rank`` and ``world_size``.
    """
    path = None if balance is None else check_path(balance, argument="balance")
    if rank is None or world_size is None:
        given = {"rank": rank, "world_size": world_size, "step": step, "balance": balance, "run": run}
        named = [name for name, value in given.items() if value is not None]
        if named:
            raise InvalidRequestError(argument=named[0], reason="it needs both rank and world_size")
        return None
    world_size = check_integer("world_size", world_size, 1)
    rank = check_integer("rank", rank, 0, maximum=world_size - 1)
    is_named = step is not None
    number = check_integer("step", step, 0, maximum=MAX_STEP) if is_named else 0
    return Share(rank, world_size, number, path, is_named, _parse_run(run))


def _parse_run(run: Any) -> str:
    if run is None:
        return read_run_id()
    if isinstance(run, bool) or not isinstance(run, (str, int)):
        raise InvalidRequestError(argument="run", reason=f"{run!r} is neither a str nor an int")
    if len(str(run).encode()) > MAX_RUN_BYTES:
        raise InvalidRequestError(argument="run", reason=f"it has more than {MAX_RUN_BYTES} bytes in UTF-8")
    return str(run)
