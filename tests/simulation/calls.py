"""Calls, with their outcomes and times. The models of stores compare answers with them."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, Literal, TypeVar

from tdserve.base.errors import TDServeError
from tdserve.v1 import control_pb2
from tests.simulation.simulated_client import UnknownError

Outcome = Literal["open", "done", "failed", "unknown"]
_What = TypeVar("_What")

INTERNAL = ("LocalProtocolError", "RemoteProtocolError", "CorruptDataError")
"""Errors that no call of a simulation may get: a fault of the server, or damage."""


@dataclass(eq=False)
class Call(Generic[_What]):
    """One call.

    Attributes:
        what: What it asks for.
        outcome: ``failed``: nothing was changed; ``unknown``: it was or was not carried out, or will be soon.
        begun, ended: Its place in the order of all beginnings and ends.
    """

    what: _What
    begun: int
    outcome: Outcome = "open"
    ended: int = 0
    done: control_pb2.Done = field(default_factory=control_pb2.Done)
    error: TDServeError | None = None

    def is_before(self, other: Call[object]) -> bool:
        """Whether it was acknowledged before the other one began."""
        return self.outcome == "done" and self.ended < other.begun


class Calls:
    """The order in which calls begin and end."""

    def __init__(self) -> None:
        self._order = count(1)

    def begin(self, what: _What) -> Call[_What]:
        """Returns a call that begins now."""
        return Call(what, next(self._order))

    async def settle(self, call: Call[_What], answer: Awaitable[control_pb2.Done]) -> Call[_What]:
        """Waits for the answer to a call.

        Raises:
            AssertionError: It is an error that no call may get.
        """
        try:
            call.done = await answer
            call.outcome = "done"
        except TDServeError as error:
            call.outcome, call.error = "failed", error
        except UnknownError:
            call.outcome = "unknown"
        assert type(call.error).__name__ not in INTERNAL, f"{call.what}: {type(call.error).__name__}: {call.error}"
        call.ended = next(self._order)
        return call
