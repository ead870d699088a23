from __future__ import annotations

import socket

import pytest

from tdserve.base.errors import ConnectError
from tdserve.client.session.channels.network_interface import (
    find_content_address,
    find_offered_address,
    make_channel_error,
)


def test_address_towards_when_the_name_resolves_then_ours() -> None:
    assert find_content_address("127.0.0.1:1") == "127.0.0.1"
    assert find_content_address("[::1]:1") == "::1"


def test_address_towards_when_the_server_names_its_address_then_the_interface_that_reaches_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert find_content_address("localhost:1", "127.0.0.1") == "127.0.0.1"
    assert find_content_address("localhost:1", "::1") == "::1"
    monkeypatch.setenv("TDSERVE_INTERFACE", "lo")
    assert find_content_address("localhost:1", "::1") == "127.0.0.1", "the user wants this one"


def test_address_towards_when_it_does_not_then_connect_error() -> None:
    with pytest.raises(ConnectError, match="does not resolve"):
        find_content_address("no.such.name.invalid:1")


def test_address_for_when_others_are_on_other_machines_then_not_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    here, far = socket.gethostname(), ["127.0.0.9"]  # reached by 127.0.0.1
    assert find_offered_address([here, "elsewhere"], "127.0.0.7", beyond=far) == "127.0.0.1"
    assert find_offered_address([here, "elsewhere"], "::1", beyond=["no address", *far]) == "127.0.0.1"
    assert find_offered_address([here, here], "127.0.0.7", beyond=far) == "127.0.0.7", "all are here"
    assert find_offered_address([here, "elsewhere"], "192.0.2.7", beyond=far) == "192.0.2.7", (
        "it is one that others reach"
    )
    with pytest.raises(ConnectError, match=r"127\.0\.0\.7.* TDSERVE_INTERFACE"):
        find_offered_address([here, "elsewhere"], "127.0.0.7", beyond=["no address"])
    monkeypatch.setenv("TDSERVE_INTERFACE", "lo")
    assert find_offered_address([here, "elsewhere"], "127.0.0.7", beyond=far) == "127.0.0.7", "the user wants this one"


def test_make_channel_error_when_made_then_one_line_with_the_reason_the_address_and_the_remedy() -> None:
    message = str(make_channel_error("gloo: no channel", "server:7707", "10.0.0.2"))
    assert "server:7707" in message
    assert "gloo: no channel; content needs gloo" in message
    assert "10.0.0.2 must be reachable from here" in message
    for what_to_set in ("TDSERVE_INTERFACE", "network_mode: host", "--advertise", "transport='shm'"):
        assert what_to_set in message
    assert "\n" not in message
