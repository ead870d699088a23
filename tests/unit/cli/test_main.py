"""tdserve/cli/main.py: exit codes, and errors on one line of stderr."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tdserve.base.errors import list_error_classes
from tdserve.cli.main import cli, main
from tdserve.cli.shell.exit_codes import EXIT_CODES, FAILED, INTERRUPTED, REFUSED
from tdserve.cli.shell.lasting import is_lasting

ROOT = Path(__file__).parents[3]
COMMANDS = (
    *(
        "serve",
        "health",
        "ls",
        "info",
        "keys",
        "head",
        "tail",
        "versions",
        "get",
        "put",
        "check",
        "checkpoint",
        "restore",
        "rm",
        "adopt",
        "import",
    ),
    *(
        "rebalance",
        "stats",
        "sessions",
        "top",
        "config",
        "certs",
        "token",
        "bench",
        "soak",
        "demo",
        "guide",
        "completion",
        "version",
    ),
)


def test_help_when_asked_then_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    listed = capsys.readouterr().out.partition("Commands:")[2].split("\n")
    assert {line.split()[0] for line in listed if line.strip()} == {*COMMANDS}


@pytest.mark.parametrize("command", COMMANDS)
def test_command_when_asked_for_help_then_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    assert "Usage: tdserve" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["nothing"],
        ["keys"],
        ["head", "a", "-n", "0"],
        ["ls", "--color"],
        ["bench", "all"],
        ["bench", "simulate", "--plot", "a.png"],
        ["bench", "peers", "--plot", "a.png"],
        ["bench", "peers", "small"],
        ["guide", "nothing"],
        ["demo", "--seed", "x"],
        ["serve", "--umask", "9"],
    ],
)
def test_command_line_when_wrong_then_exit_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tdserve: ")
    assert line.endswith("--help shows the usage")


def test_commands_when_they_run_until_they_are_terminated_then_marked_as_lasting() -> None:
    assert {name for name, command in cli.commands.items() if is_lasting(command)} == {"serve", "demo"}


@pytest.mark.parametrize("command", ["bench", "demo"])
def test_transport_when_this_version_lacks_it_then_not_offered(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--transport", "pigeon"]) == 2
    assert "'auto', 'shm', 'nccl', 'gloo', 'grpc'" in capsys.readouterr().err


def test_error_when_the_token_cannot_be_read_then_one_line_and_its_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ls", "--token-file", str(tmp_path / "two\nlines")]) == REFUSED
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("tdserve: invalid --token-file")
    assert shown.err.count("\n") == 1


@pytest.mark.slow
def test_help_when_interpreter_is_fresh_then_does_not_wait_for_torch() -> None:
    program = "import sys, tdserve.cli.main as m; m.main(['ls', '--help']); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.DEVNULL, check=True)


@pytest.mark.slow
def test_output_when_its_reader_went_away_then_no_traceback() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "tdserve", "--help"]
    with open(writer, "w") as output:
        done = subprocess.run(command, cwd=ROOT, stdout=output, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")


def test_guide_when_it_lists_commands_and_exit_codes_then_all_there_are() -> None:
    page = (ROOT / "tdserve/guide/command-line.md").read_text()
    table = page.partition("| command | does |")[2].partition("\n\n")[0]
    named = {
        name.split()[0] for row in table.splitlines()[2:] for name in re.findall(r"`([\w -]+)`", row.split("|")[1])
    }
    assert named == {*cli.commands}
    codes = page.partition("| code | meaning |")[2].partition("\n\n")[0]
    listed = {int(code) for row in codes.splitlines()[2:] for code in row.split("|")[1].split(",")}
    assert listed == {0, 2, 143, FAILED, INTERRUPTED, *EXIT_CODES.values()}


def test_exit_codes_when_there_is_a_code_of_errors_then_it_is_known_or_any_other() -> None:
    codes = {error.code for error in list_error_classes().values()}
    assert codes - {*EXIT_CODES} == {"INTERNAL", "INVALID_ARGUMENT", "UNIMPLEMENTED", "ABORTED"}


@pytest.mark.parametrize(("other", "own"), [("delete", "rm"), ("list", "ls"), ("describe", "info")])
def test_command_when_another_program_calls_it_so_then_its_own_name_is_suggested(
    other: str, own: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([other, "name"]) == 2
    assert f"No such command '{other}'. Did you mean '{own}'?" in capsys.readouterr().err
