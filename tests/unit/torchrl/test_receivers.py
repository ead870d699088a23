from __future__ import annotations

from collections.abc import Iterator

import pytest

import tdserve
from tdserve.torchrl.receivers import Receivers
from tests.roots import make_quick_root


@pytest.fixture(scope="module")
def client() -> Iterator[tdserve.Client]:
    with make_quick_root() as root, tdserve.Server(root, grace_s=1.0) as server, server.client() as made:
        yield made


@pytest.fixture
def receivers(client: tdserve.Client) -> Receivers:
    made = Receivers(client, "policy")
    made.clear()
    return made


def test_states_when_reported_then_the_last_of_each(receivers: Receivers) -> None:
    assert receivers.list_states() == {}
    receivers.report("0", 0, 0.0, "no")
    receivers.report("1", 3, 1.0, "")
    receivers.report("1", 4, 1.0, "broken")
    states = receivers.list_states()
    assert states["0"] == (0, float("inf"), "no")
    assert (states["1"].version, states["1"].last_error) == (4, "broken")
    assert states["1"].age_s > 1e9
    receivers.clear()
    assert receivers.list_states() == {}


def test_wait_applied_when_all_confirm_then_returns_and_when_one_failed_then_an_error_with_its_reason(
    receivers: Receivers,
) -> None:
    receivers.confirm("0", 1, "")
    receivers.confirm("1", 1, "")
    receivers.wait_applied(["0", "1"], 1, 5.0)
    receivers.confirm("0", 2, "")
    receivers.confirm("1", 2, "KeyError: 'x'")
    with pytest.raises(tdserve.WrongStateError, match="worker 1: KeyError: 'x'"):
        receivers.wait_applied(["0", "1"], 2, 5.0)


def test_wait_applied_when_one_acts_with_a_newer_version_then_returns(receivers: Receivers) -> None:
    receivers.confirm("0", 2, "")
    receivers.report("1", 3, 1.0, "")
    receivers.wait_applied(["0", "1"], 2, 5.0)
    receivers.report("1", 4, 1.0, "")
    with pytest.raises(tdserve.DeadlineExceededError, match="version 5 of 'policy' in workers 1"):
        receivers.wait_applied(["1"], 5, 0.1)


def test_wait_applied_when_one_is_silent_then_the_error_names_it(receivers: Receivers) -> None:
    receivers.confirm("0", 1, "")
    with pytest.raises(tdserve.DeadlineExceededError, match="version 1 of 'policy' in workers 7"):
        receivers.wait_applied(["0", "7"], 1, 0.1)
