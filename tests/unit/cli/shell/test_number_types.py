"""tdserve/cli/shell/number_types.py: a time is a finite number."""

from __future__ import annotations

import pytest

from tdserve.cli.main import main


@pytest.mark.parametrize("text", ["nan", "inf", "1e400", "1e300"])
@pytest.mark.parametrize(
    "arguments",
    [
        ["health", "--wait"],
        ["tail", "a", "--interval"],
        ["top", "--interval"],
        ["soak", "--minutes"],
        ["soak", "--kill-every"],
        ["demo", "--max-seconds"],
        ["demo", "--linger"],
    ],
    ids="".join,
)
def test_time_when_it_is_no_finite_number_then_refused_in_one_line(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, text]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"tdserve: Invalid value for '{arguments[-1]}': ")
    assert "is not a number up to 1,000,000,000" in line


def test_time_when_it_is_below_the_range_then_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["health", "--wait", "-1"]) == 2
    assert "-1.0 is not in the range x>=0.0" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["infG", "1e400G"])
def test_size_when_it_is_no_finite_number_then_refused_in_one_line(
    text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "show", "--memory-limit", text]) == 2
    assert f"'{text}' is no SIZE" in capsys.readouterr().err
    monkeypatch.setenv("TDSERVE_MEMORY_LIMIT_BYTES", text)
    assert main(["config", "show"]) == 1
    assert f"'{text}' does not parse as memory_limit_bytes" in capsys.readouterr().err
