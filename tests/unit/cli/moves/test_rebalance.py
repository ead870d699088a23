"""``tdserve rebalance``: what it refuses before it asks any server."""

from __future__ import annotations

import pytest

from tdserve.cli.main import main


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ([], "name the stores that move"),
        (["a", "--drain", "1"], "name the stores that move"),
        (["--drain", "1", "--to", "0"], "--drain chooses the new servers"),
        (["a", "--address", "127.0.0.1:1"], "127.0.0.1:1 is one server; give all of them"),
    ],
)
def test_rebalance_when_arguments_leave_open_what_moves_where_then_exits_with_2(
    arguments: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rebalance", *arguments]) == 2
    assert hint in capsys.readouterr().err
