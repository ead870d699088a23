"""tdserve/cli/serving/serve.py: settings are refused before anything is created."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tdserve.cli.main import main


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Restores the signal handlers that the command has set."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--host", "0.0.0.0"], "--token-file"),
        (["--port", "65536"], "port"),
        (["--workers", "0"], "num_workers"),
        (["--device", "cuda:0,cpu"], "'cpu' is not a CUDA device"),
        (["--device", "cuda:0", "--device", "cuda:1,cuda:2", "--workers", "2"], "3 are not one for each of 2"),
        (["--transfer-timeout", "0"], "transfer_timeout_s"),
        (["--grace", "-1"], "grace_s"),
        (["--advertise", "http://here"], "advertise"),
        (["--interface", "eth77"], "interface"),
        (["--umask", "1777"], "umask"),
    ],
)
def test_serve_when_a_setting_is_invalid_then_prints_the_reason_and_creates_nothing(
    tmp_path: Path, options: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(tmp_path / "root"), *options]) == 1
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "root").exists()


def test_serve_when_no_root_is_given_then_prints_how_to_set_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve"]) == 1
    assert "TDSERVE_ROOT" in capsys.readouterr().err
