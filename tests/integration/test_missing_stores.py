"""A wait for a store that does not exist ends soon, with an error that lists similar names."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.client.session.catalog import catalog_client
from tdserve.client.session.requests import pending
from tests.processes import wait_for

pytestmark = pytest.mark.integration

TD = TensorDict({"a": torch.zeros(3)}, [3])
WAIT_S = 2.0
"""Timeout of a call for a store that never appears. Even a busy machine warns within this time."""

CALLS: dict[str, Callable[[tdserve.Client, str, float], Any]] = {
    "replay": lambda client, name, timeout_s: client.replay(name, timeout_s=timeout_s),
    "queue": lambda client, name, timeout_s: client.queue(name, timeout_s=timeout_s),
    "latest": lambda client, name, timeout_s: client.latest(name, timeout_s=timeout_s),
    "from_remote_init": lambda client, name, timeout_s: client.from_remote_init(name, timeout_s=timeout_s),
    "recv": lambda client, name, timeout_s: client.recv(TD.clone(), name, timeout_s=timeout_s),
}


@pytest.mark.slow
def test_calls_when_the_name_is_misspelt_then_a_warning_meanwhile_and_an_error_at_the_end(
    client: tdserve.Client, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for module, constant in ((catalog_client, "LOOK_AFTER_S"), (pending, "SLOW_S")):
        monkeypatch.setattr(module, constant, 0.02)
    client.init_remote(TD, name)
    misspelt_names = [f"{name}{number}" for number in range(len(CALLS))]
    with ThreadPoolExecutor(len(CALLS)) as threads:
        errors = list(threads.map(partial(_wait_in_vain, client), CALLS.values(), misspelt_names))
    for error, misspelt, call in zip(errors, misspelt_names, CALLS.values(), strict=True):
        assert isinstance(error, tdserve.StoreNotCreatedError)
        assert isinstance(error, tdserve.DeadlineExceededError)
        assert error.name == misspelt
        assert error.timeout_s == pytest.approx(WAIT_S)
        assert f"there is no store {misspelt!r}, but {name!r}" in str(error)
        with pytest.raises(
            tdserve.StoreNotFoundError, match=f"there is no store {misspelt!r}, but {name!r}; client.stores"
        ):
            call(client, misspelt, 0)
        assert f"store {misspelt!r}: there is none yet, but {name!r}" in caplog.text


def _wait_in_vain(client: tdserve.Client, call: Callable[..., object], misspelt: str) -> Exception | None:
    try:
        call(client, misspelt, WAIT_S)
    except Exception as error:  # noqa: BLE001 (the test looks at it)
        return error
    return None


@pytest.mark.parametrize(
    "call",
    [
        lambda client, name: client[name],
        lambda client, name: client.describe(name),
        lambda client, name: client.describe(name, timeout_s=0),
        lambda client, name: client.keys(name),
        lambda client, name: client.delete(name),
        lambda client, name: client.send(TD, name),
    ],
    ids=["getitem", "describe", "describe once", "keys", "delete", "send"],
)
def test_call_when_it_does_not_wait_for_a_misspelt_name_then_the_error_lists_similar_ones(
    client: tdserve.Client, name: str, call: Callable[[tdserve.Client, str], Any]
) -> None:
    client.init_remote(TD, name)
    misspelt = f"{name[:-2]}{name[-1]}"
    with pytest.raises(tdserve.StoreNotFoundError, match=f"there is no store {misspelt!r}, but {name!r}") as raised:
        call(client, misspelt)
    assert raised.value.name == misspelt
    assert misspelt not in client


def test_call_when_the_store_comes_after_the_warning_then_it_goes_on(
    client: tdserve.Client, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(catalog_client, "LOOK_AFTER_S", 0.02)
    waiting = client.run_later(lambda: client.replay(name, timeout_s=30.0))
    wait_for(lambda: f"store {name!r}: there is none yet" in caplog.text, "a warning")
    client.create_replay(name, TD[0], 8)
    assert waiting.result(20.0).capacity == 8


def test_latest_when_the_store_is_there_and_only_its_version_is_missing_then_no_warning(
    client: tdserve.Client, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pending, "SLOW_S", 0.0)
    version = client.publish(name, TD)
    with pytest.raises(tdserve.DeadlineExceededError, match="newer than"):
        client.latest(name, newer_than=version, timeout_s=0.1)
    assert not caplog.records
