"""tdserve/cli/serving/config_show.py: each option with where it comes from."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from tdserve.cli.main import main


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Environment variables without any of tdserve's."""
    for name in [name for name in os.environ if name.startswith("TDSERVE_")]:
        monkeypatch.delenv(name)
    return monkeypatch


@pytest.fixture
def path(tmp_path: Path, variables: pytest.MonkeyPatch) -> Path:
    """A file of options."""
    path = tmp_path / "tdserve.toml"
    path.write_text('[server]\nroot = "data"\nport = 1\ngrace_s = 1.5\nnum_workers = 3\n')
    return path


def test_show_when_an_option_is_set_at_several_places_then_flag_variable_file_default(
    path: Path, variables: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    variables.setenv("TDSERVE_PORT", "2")
    variables.setenv("TDSERVE_GRACE_S", "2.5")
    assert main(["config", "show", "--config", str(path), "--port", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["port"] == {"value": 3, "from": "--port"}
    assert found["grace_s"] == {"value": 2.5, "from": "TDSERVE_GRACE_S"}
    assert found["num_workers"] == {"value": 3, "from": str(path)}
    assert found["root"] == {"value": str(path.parent / "data"), "from": str(path)}
    assert found["host"] == {"value": "127.0.0.1", "from": "default"}


def test_show_when_a_variable_names_the_file_then_read(
    path: Path, variables: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    variables.setenv("TDSERVE_CONFIG", str(path))
    assert main(["config", "show", "elsewhere"]) == 0
    table = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()}
    assert table["root"] == ["elsewhere", "ROOT"]
    assert table["port"] == ["1", str(path)]


def test_show_when_a_server_could_not_start_then_shows_all_and_fails(
    variables: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "show", "data", "--port", "70000"]) == 1
    shown = capsys.readouterr()
    assert "70000" in shown.out
    assert shown.err.startswith("tdserve: invalid port")


def test_show_when_there_is_no_root_then_the_others_are_shown_and_checked(
    variables: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "show", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["root"], found["port"]["from"]) == ({"value": None, "from": "default"}, "default")
    assert main(["config", "show", "--port", "70000"]) == 1
    assert capsys.readouterr().err.startswith("tdserve: invalid port")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--token-file", "/nowhere/token"], "invalid token_file: cannot read /nowhere/token"),
        (["--tokens", "/nowhere/tokens.json"], "invalid tokens_file: "),
        (["--adopt", "/nowhere/folder=name"], "invalid adopt: there is no folder /nowhere/folder"),
        (["--interface", "no-such-if"], "invalid interface"),
        (["--host", "192.0.2.1", "--insecure"], "invalid address: 192.0.2.1:0 cannot be listened on"),
    ],
)
def test_show_when_what_an_option_names_is_not_on_this_machine_then_shows_all_and_fails(
    variables: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    assert main(["config", "show", *options]) == 1
    shown = capsys.readouterr()
    assert options[1].partition("=")[0] in shown.out
    (line,) = shown.err.splitlines()
    assert line.startswith(f"tdserve: {said}")


def test_show_when_what_the_options_name_is_there_then_they_are_fine(
    variables: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("secret")
    options = ["--token-file", str(tmp_path / "token"), "--adopt", f"{tmp_path}=name:ro", "--interface", "lo"]
    with socket.socket() as used:
        used.bind(("127.0.0.1", 0))
        used.listen()
        assert main(["config", "show", *options, "--port", str(used.getsockname()[1])]) == 0


def test_serve_when_the_file_has_a_wrong_option_then_one_line_and_nothing_created(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path.write_text('[server]\nroot = "data"\nprot = 1\n')
    assert main(["serve", "--config", str(path)]) == 1
    assert "did you mean" in capsys.readouterr().err
    assert not (path.parent / "data").exists()
