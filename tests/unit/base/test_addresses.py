from __future__ import annotations

import socket
import time
from threading import Event

import pytest

from tdserve.base.addresses import (
    check_listenable,
    explain_unreachable,
    find_interface_address,
    find_interface_name,
    find_source_address,
    join_address,
    parse_address,
    resolve,
)
from tdserve.base.errors import ConnectError, InvalidRequestError
from tests.processes import quiet_port


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("server", ("server", None)),
        ("server:7707", ("server", 7707)),
        ("my_stack-server.net_1:1", ("my_stack-server.net_1", 1)),
        ("10.0.0.7:65535", ("10.0.0.7", 65535)),
        ("[::1]:7707", ("::1", 7707)),
        ("[fe80::1%eth0]", ("fe80::1%eth0", None)),
        ("::1", ("::1", None)),
    ],
)
def test_parse_address_when_it_is_one_then_host_and_port(text: str, found: tuple[str, int | None]) -> None:
    assert parse_address("x", text) == found


@pytest.mark.parametrize(
    "text", ["", ":7707", "a:", "a:0", "a:65536", "a:http", "tcp://a:1", "a b", "[a]:1", "a:1:2", "[::1", "-x", "a:1\n"]
)
def test_parse_address_when_it_is_none_then_refused_by_its_name(text: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_address("advertise", text)
    assert caught.value.argument == "advertise"


def test_join_address_when_ipv6_then_in_brackets() -> None:
    assert join_address("server", 1) == "server:1"
    assert join_address("::1", 1) == join_address("[::1]", 1) == "[::1]:1"


def test_resolve_when_numeric_then_itself() -> None:
    assert resolve("127.0.0.1:1") == ["127.0.0.1"]
    assert resolve("[::1]:1") == ["::1"]


def test_resolve_when_the_name_is_unknown_then_the_error_names_it() -> None:
    with pytest.raises(ConnectError, match=r"'no-such-name\.invalid' does not resolve"):
        resolve("no-such-name.invalid:1")


def test_resolve_when_the_name_comes_later_then_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the system's resolver: a test has no network whose names come and go."""
    num_asked = 0

    def look(host: str, *_: object, **__: object) -> list[tuple[int, int, int, str, tuple[str, int]]]:
        nonlocal num_asked
        num_asked += 1
        if num_asked < 3:
            raise socket.gaierror(socket.EAI_AGAIN, "try again")
        return [(2, 1, 6, "", ("10.0.0.9", 0)), (2, 1, 6, "", ("10.0.0.7", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", look)
    assert resolve("later:1", timeout_s=10.0) == ["10.0.0.7", "10.0.0.9"]
    num_asked = -100
    began_s = time.monotonic()
    with pytest.raises(ConnectError, match="try again"):
        resolve("later:1", timeout_s=0.6)
    assert time.monotonic() - began_s < 5.0


def test_resolve_when_it_is_given_up_then_ends_at_once_and_has_reported_the_reason() -> None:
    given_up = Event()
    reasons: list[str] = []

    def tell(reason: str) -> None:
        reasons.append(reason)
        given_up.set()

    with pytest.raises(ConnectError, match="does not resolve"):
        resolve("no-such-name.invalid:1", timeout_s=600.0, given_up=given_up, on_unknown=tell)
    assert len(reasons) == 1
    assert "'no-such-name.invalid'" in reasons[0]


def test_address_towards_when_loopback_then_loopback() -> None:
    assert find_source_address("127.0.0.1") == "127.0.0.1"
    assert find_source_address("127.0.1.1") == "127.0.0.1"  # what Debian calls a host's own name
    assert find_source_address("::1") == "::1"


def test_address_towards_when_it_is_no_address_then_connect_error() -> None:
    with pytest.raises(ConnectError):
        find_source_address("no address")


@pytest.mark.parametrize(("interface", "address"), [("lo", "127.0.0.1"), ("10.0.0.7", "10.0.0.7"), ("[::1]", "::1")])
def test_interface_address_when_a_name_or_an_address_then_the_address(interface: str, address: str) -> None:
    assert find_interface_address(interface) == address


@pytest.mark.parametrize("interface", ["eth77", "no interface", "", "a" * 300])
def test_interface_address_when_there_is_none_then_names_those_here(interface: str) -> None:
    with pytest.raises(InvalidRequestError, match="lo"):
        find_interface_address(interface)


def test_check_listenable_when_free_then_returns_and_when_not_then_the_error_has_the_reason() -> None:
    with socket.socket() as other:
        port = quiet_port()
        other.bind(("127.0.0.1", port))
        other.listen()
        with pytest.raises(InvalidRequestError, match=f"127.0.0.1:{port} .* in use.*--port 0"):
            check_listenable("127.0.0.1", port)
    check_listenable("127.0.0.1", port)
    check_listenable("[::1]", 0)
    check_listenable("0.0.0.0", 0)
    with pytest.raises(InvalidRequestError, match=r"192\.0\.2\.1:0 cannot be listened on: cannot assign"):
        check_listenable("192.0.2.1", 0)


def test_explain_unreachable_when_the_port_is_closed_then_refused_and_else_nothing() -> None:
    assert explain_unreachable(f"127.0.0.1:{quiet_port()}") == "connection refused"
    with socket.create_server(("127.0.0.1", 0)) as listening:
        assert explain_unreachable(f"127.0.0.1:{listening.getsockname()[1]}") == ""


def test_interface_name_when_given_by_name_or_address_then_the_name() -> None:
    assert find_interface_name("eth7") == "eth7"
    assert find_interface_name("127.0.0.1") == "lo"
    assert find_interface_name("203.0.113.7") is None
