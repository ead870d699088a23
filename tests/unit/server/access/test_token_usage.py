"""tdserve/server/access/token_usage.py: the limits of a token, with a clock of the test."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest

from tdserve.base.errors import ServerBusyError
from tdserve.rules.access.grants import Grant, Limits
from tdserve.rules.access.roles import Role
from tdserve.server.access.token_usage import TokenUsages
from tdserve.server.execution.admission_budget import REQUEST_BYTES
from tdserve.v1 import control_pb2

MESSAGE = control_pb2.ReadRequest(store="s")


class Clock:
    """A clock that a test moves on."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def make_grant(name: str = "t", **limits: Any) -> Grant:
    """Returns the grant of a token with these limits."""
    return Grant(name, Role.ADMIN, limits=Limits(**limits))


def test_admit_when_there_is_no_limit_then_always() -> None:
    usages = TokenUsages(Clock())
    with ExitStack() as under_way:
        for _ in range(1000):
            under_way.enter_context(usages.admit(make_grant(), MESSAGE))


@pytest.mark.parametrize("limits", [{"requests": 2}, {"held_bytes": 2 * (REQUEST_BYTES + MESSAGE.ByteSize())}])
def test_admit_when_a_limit_is_reached_then_refused_until_one_ends(limits: dict[str, Any]) -> None:
    usages, grant = TokenUsages(Clock()), make_grant(**limits)
    with usages.admit(grant, MESSAGE):
        with usages.admit(grant, MESSAGE):
            with pytest.raises(ServerBusyError, match="of token 't'") as caught:
                usages.admit(grant, MESSAGE)
            assert caught.value.limit == next(iter(limits.values()))
            usages.admit(make_grant("another", **limits), MESSAGE)
        with usages.admit(grant, MESSAGE):
            pass


def test_rate_when_requests_come_faster_then_refused_and_granted_again_with_time() -> None:
    clock = Clock()
    usages, grant = TokenUsages(clock), make_grant(rate=10)

    def count_admitted() -> int:
        num = 0
        while True:
            try:
                usages.admit(grant, MESSAGE)
            except ServerBusyError:
                return num
            num += 1

    assert count_admitted() == 10
    clock.now_s += 0.35
    assert count_admitted() == 3
    clock.now_s += 1000.0
    assert count_admitted() == 10


def test_rate_when_below_one_per_second_then_one_in_that_time() -> None:
    clock = Clock()
    usages, grant = TokenUsages(clock), make_grant(rate=0.5)
    usages.admit(grant, MESSAGE)
    clock.now_s += 1.9
    with pytest.raises(ServerBusyError):
        usages.admit(grant, MESSAGE)
    clock.now_s += 0.2
    usages.admit(grant, MESSAGE)
