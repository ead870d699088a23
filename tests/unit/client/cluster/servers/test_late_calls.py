"""How long a call of a cluster waits for a server that does not answer, when little of its own time is left."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest

from tdserve.base.deadline import ONCE_GRACE_S, Deadline
from tdserve.base.errors import DeadlineExceededError
from tdserve.client.client import Client
from tdserve.client.cluster.servers import members
from tdserve.client.cluster.servers.directory import LOOK_S, SHORTEST_S, compute_look_s
from tdserve.client.cluster.servers.members import LATE_PROBE_S, Members
from tdserve.client.cluster.servers.membership import StaticMembership
from tdserve.client.session.calls.call_deadline import within
from tdserve.rules.lost_servers import PROBE_TIMEOUT_S


@pytest.mark.parametrize(
    ("timeout_s", "least_s", "most_s"),
    [
        (0.3, 0.0, 0.3),
        (0.8, SHORTEST_S, SHORTEST_S),
        (6.0, 2.9, 3.0),
        (None, LOOK_S, LOOK_S),
        (0.0, ONCE_GRACE_S, ONCE_GRACE_S),
    ],
)
def test_look_when_little_time_is_left_then_it_takes_no_more(
    timeout_s: float | None, least_s: float, most_s: float
) -> None:
    assert least_s <= compute_look_s(Deadline.after(timeout_s)) <= most_s


def test_look_when_no_time_is_left_then_it_is_none_that_asks_once() -> None:
    assert 0.0 < compute_look_s(Deadline.after(60.0, clock=iter([0.0, *[61.0] * 9]).__next__)) < SHORTEST_S


@pytest.mark.parametrize(
    ("timeout_s", "probe_s"), [(1e-9, LATE_PROBE_S), (60.0, PROBE_TIMEOUT_S), (0.0, PROBE_TIMEOUT_S)]
)
def test_probe_when_the_time_of_the_call_is_over_then_a_short_one(
    monkeypatch: pytest.MonkeyPatch, timeout_s: float, probe_s: float
) -> None:
    probes: list[float] = []

    def note_probe(address: str, *, timeout_s: float, tls: Any) -> bool:
        probes.append(timeout_s)
        return False

    def fail() -> NoReturn:
        raise DeadlineExceededError(what="an answer", timeout_s=timeout_s)

    monkeypatch.setattr(members, "check_health", note_probe)
    asked = Members(StaticMembership("127.0.0.1:1,127.0.0.1:2"), Client)
    with within(Deadline.after(timeout_s)):
        found, lost = asked.ask_all({1: fail}, deadline=Deadline.after(60.0))
    asked.close()
    assert (found, [*lost], probes) == ({}, [1], [probe_s])
