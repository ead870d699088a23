from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest

from tdserve.base.deadline import GRACE_S
from tdserve.base.errors import ClosedError, DeadlineExceededError, StoreNotCreatedError, StoreNotFoundError
from tdserve.client.session.catalog import catalog_client
from tdserve.client.session.catalog.catalog_client import MAX_WARNED, MIN_LOOK_S, MissingNames
from tests.memory import count_bytes
from tests.processes import wait_for

NAMES = ["policy", "replay", "replay-2", "replica"]


def names_around(name: str, num_names: int, timeout_s: float) -> Sequence[str]:
    """Answers as a server with few stores does."""
    assert num_names >= len(NAMES)
    return NAMES


def silent(name: str, num_names: int, timeout_s: float) -> Sequence[str]:
    """Raises as a closed client does."""
    raise ClosedError(what="the client")


def test_find_near_when_a_name_is_misspelt_then_the_nearest_first() -> None:
    missing = MissingNames(names_around)
    assert missing.find_near("repaly") == ["replay", "replay-2", "replica"]
    assert missing.find_near("something else") == []
    assert missing.find_near("policy") is None


@pytest.mark.slow
def test_warn_when_a_store_does_not_exist_then_once_with_names_that_are_near(caplog: pytest.LogCaptureFixture) -> None:
    missing = MissingNames(names_around)
    for name in ("polcy", "polcy", "policy"):
        missing.warn(name, 9.0)
    MissingNames(silent).warn("polcy", 9.0)
    assert [record.name for record in caplog.records] == ["tdserve.client"]
    assert caplog.records[0].levelno == logging.WARNING
    assert "store 'polcy': there is none yet, but 'policy'" in caplog.text
    sizes = []
    for number in range(4 * MAX_WARNED):  # the number of remembered names is limited
        missing.warn(f"another {number}", 9.0)
        sizes.append(count_bytes(missing))
    assert max(sizes) <= 2 * sizes[MAX_WARNED]


@pytest.mark.parametrize("left_s", [1.0, 0.5, 0.42, 0.0])
def test_warn_when_little_time_is_left_then_asks_no_longer(left_s: float) -> None:
    asked_s: list[float] = []

    def ask(name: str, num_names: int, timeout_s: float) -> Sequence[str]:
        asked_s.append(timeout_s)
        return NAMES

    MissingNames(ask).warn("polcy", left_s)
    assert all(each_s + GRACE_S <= left_s for each_s in asked_s)
    assert len(asked_s) == (left_s > GRACE_S + MIN_LOOK_S)


def test_explain_when_a_wait_is_over_then_it_has_the_time_of_the_whole_call() -> None:
    explained = MissingNames(silent).explain(DeadlineExceededError(what="it", timeout_s=1.4), 1.0)
    assert str(explained) == "it did not happen within 1 s"


def test_explain_when_names_are_near_or_the_server_is_silent_then_the_same_error_of_the_whole_call() -> None:
    error = StoreNotCreatedError(what="the creation of store 'polcy'", timeout_s=0.5, name="polcy")
    explained = MissingNames(names_around).explain(error, 30.0)
    assert str(explained) == (
        "the creation of store 'polcy' did not happen within 30 s: there is no store 'polcy', but 'policy'"
    )
    assert explained.name == "polcy"
    assert str(MissingNames(silent).explain(error, 30.0)).endswith("there is no store 'polcy'")
    missing = MissingNames(names_around).explain(StoreNotFoundError(name="polcy"), 30.0)
    assert str(missing) == "there is no store 'polcy', but 'policy'; client.stores() lists the stores"


def test_watch_when_the_block_lasts_then_warned_meanwhile(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    missing = MissingNames(names_around)
    with missing.watch("polcy", 9.0):
        pass
    assert not caplog.records
    monkeypatch.setattr(catalog_client, "LOOK_AFTER_S", 0.0)
    with missing.watch("polcy", 9.0):
        wait_for(lambda: "but 'policy'" in caplog.text, "a warning")
