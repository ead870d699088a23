"""Runs commands against a live server, and looks at what they print."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tdserve.cli.main import main


class Shell:
    """Runs commands in this process and keeps what they print."""

    def __init__(self, address: str, capsys: pytest.CaptureFixture[str]) -> None:
        self._address = address
        self._capsys = capsys

    def lines(self, *arguments: str) -> list[str]:
        """Standard output, line by line; the command must succeed."""
        assert main([*arguments, "--address", self._address]) == 0
        return self._capsys.readouterr().out.splitlines()

    def run(self, code: int, *arguments: str) -> tuple[str, str]:
        """Standard output and error of a command with this exit code."""
        assert main([*arguments, "--address", self._address]) == code
        shown = self._capsys.readouterr()
        return shown.out, shown.err

    def json(self, *arguments: str) -> Any:
        """The one JSON document that a command prints."""
        (line,) = self.lines(*arguments, "--json")
        return json.loads(line)

    def error(self, code: int, *arguments: str) -> str:
        """The one line of an error with this exit code; nothing else is printed."""
        assert main([*arguments, "--address", self._address]) == code
        shown = self._capsys.readouterr()
        assert shown.out == ""
        (line,) = shown.err.splitlines()
        return line
