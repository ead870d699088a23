"""tdserve/cli/serving/health.py: one line, and an exit code that a health check can use."""

from __future__ import annotations

import json
import time
from threading import Timer

import pytest

from tdserve.cli.main import main
from tests.processes import quiet_port
from tests.unit.control.serving import Answering, serving


@pytest.fixture
def free_port() -> int:
    """A port on which nobody listens."""
    return quiet_port()


def test_health_when_the_server_serves_then_exit_code_0_without_a_token(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(Answering(), token="secret") as address:
        assert main(["health", "--address", address]) == 0
    assert capsys.readouterr().out == f"{address} SERVING\n"


def test_health_when_the_server_loads_or_drains_then_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(Answering(), is_serving=False) as address:
        assert main(["health", "--address", address, "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {"address": address, "status": "NOT_SERVING", "reason": ""}


def test_health_when_the_port_is_closed_then_exit_code_1_and_one_line(
    free_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["health", "--address", f"127.0.0.1:{free_port}"]) == 1
    shown = capsys.readouterr()
    assert shown.out.startswith(f"127.0.0.1:{free_port} UNREACHABLE: ")
    assert (shown.out.count("\n"), shown.err) == (1, "")


def test_health_when_the_name_does_not_resolve_then_the_error_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["health", "--address", "no-such-name.invalid:7707"]) == 1
    assert "UNREACHABLE" in (said := capsys.readouterr().out)
    assert "'no-such-name.invalid' does not resolve" in said


def test_health_when_it_waits_then_until_a_server_serves(free_port: int, capsys: pytest.CaptureFixture[str]) -> None:
    began_s = time.monotonic()
    code: list[int] = []
    address = f"127.0.0.1:{free_port}"
    asking = Timer(0.0, lambda: code.append(main(["health", "--address", address, "--wait", "60"])))
    asking.start()
    with serving(Answering(), port=free_port):
        asking.join(60.0)
    assert code == [0]
    assert time.monotonic() - began_s < 30.0
    assert capsys.readouterr().out == f"{address} SERVING\n"


def test_health_when_no_address_is_given_then_that_of_a_server_with_this_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(Answering()) as address:
        monkeypatch.setenv("TDSERVE_HOST", "0.0.0.0")
        monkeypatch.setenv("TDSERVE_PORT", address.rpartition(":")[2])
        assert main(["health"]) == 0
    assert capsys.readouterr().out == f"{address} SERVING\n"
