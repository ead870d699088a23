"""tdserve/cli/files/adopt.py: what the command line says.

tests/integration/test_adoption.py runs it against a server.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from tdserve.cli.files.adopt import adopt
from tdserve.cli.main import main
from tdserve.cli.shell.exit_codes import REFUSED


def test_adopt_when_asked_for_help_then_warns_that_the_files_change() -> None:
    said = " ".join(CliRunner().invoke(adopt, ["--help"]).output.split())
    assert "Writes to the store change the files in PATH" in said
    assert "leaves them as they are" in said


@pytest.mark.parametrize("arguments", [[], ["path"], ["path", "name", "more"]])
def test_adopt_when_an_argument_is_missing_then_a_wrong_command_line(arguments: list[str]) -> None:
    assert main(["adopt", *arguments]) == 2


def test_adopt_when_the_token_cannot_be_read_then_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["adopt", str(tmp_path), "name", "--token-file", str(tmp_path / "none")]) == REFUSED
    assert "--token-file" in capsys.readouterr().err
