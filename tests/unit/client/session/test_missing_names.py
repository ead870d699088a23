from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest

from tdserve.base.errors import ClosedError, StoreNotCreatedError
from tdserve.client.session import catalog_client
from tdserve.client.session.catalog_client import MAX_WARNED, MissingNames
from tests.integration.processes import wait_for

NAMES = ["policy", "replay", "replay-2", "replica"]


def names_around(name: str, num_names: int) -> Sequence[str]:
    """As a server with few stores answers."""
    assert num_names >= len(NAMES)
    return NAMES


def silent(name: str, num_names: int) -> Sequence[str]:
    """As a client that is closed."""
    raise ClosedError(what="the client")


def test_find_near_when_a_name_is_misspelt_then_the_nearest_first() -> None:
    missing = MissingNames(names_around)
    assert missing.find_near("repaly") == ["replay", "replay-2", "replica"]
    assert missing.find_near("something else") == []
    assert missing.find_near("policy") is None


def test_warn_when_a_store_does_not_exist_then_once_with_names_that_are_near(caplog: pytest.LogCaptureFixture) -> None:
    missing = MissingNames(names_around)
    for name in ("polcy", "polcy", "policy"):
        missing.warn(name)
    MissingNames(silent).warn("polcy")
    assert [record.name for record in caplog.records] == ["tdserve.client"]
    assert caplog.records[0].levelno == logging.WARNING
    assert "store 'polcy': there is none yet, but 'policy'" in caplog.text
    for number in range(2 * MAX_WARNED):  # what is remembered of names has an end
        missing.warn(f"another {number}")
    assert len(missing._warned_s) <= MAX_WARNED


def test_explain_when_names_are_near_or_the_server_is_silent_then_the_same_error_of_the_whole_call() -> None:
    error = StoreNotCreatedError(what="the creation of store 'polcy'", timeout_s=0.5, name="polcy")
    told = MissingNames(names_around).explain(error, 30.0)
    assert str(told) == (
        "the creation of store 'polcy' did not happen within 30 s: there is no store 'polcy', but 'policy'"
    )
    assert told.name == "polcy"
    assert str(MissingNames(silent).explain(error, 30.0)).endswith("there is no store 'polcy'")


def test_watch_when_the_block_lasts_then_warned_meanwhile(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    missing = MissingNames(names_around)
    with missing.watch("polcy"):
        pass
    assert not caplog.records
    monkeypatch.setattr(catalog_client, "LOOK_AFTER_S", 0.0)
    with missing.watch("polcy"):
        wait_for(lambda: "but 'policy'" in caplog.text, "a warning")
