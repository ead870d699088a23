"""tdserve/cli/serving/token.py: makes tokens, and entries of their file."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tdserve.base.token_file import parse_document
from tdserve.cli.main import main
from tdserve.rules.access.grants import Grant
from tdserve.rules.access.token_entries import TokenEntry, TokenTable, read_entries
from tests.processes import wait_for

NEW = ("token", "new", "--name", "learner", "--role", "write")


def find(content: bytes, token: str) -> Grant | None:
    """Returns what a token grants by the content of a file."""
    return TokenTable(read_entries(parse_document(content, "file"))).find(token.encode())


def test_new_when_no_file_is_given_then_prints_the_token_and_its_entry(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*NEW, "--stores", "replay*", "--stores", "w", "--expires", "2027-01-31", "--rate", "5"]) == 0
    token, _, rest = capsys.readouterr().out.partition("\n")
    entry: dict[str, Any] = json.loads(rest)
    assert token.partition(".")[2] not in rest
    grant = find(json.dumps({"tokens": [entry]}).encode(), token)
    assert grant is not None
    assert (grant.stores, grant.limits.rate) == (("replay*", "w"), 5)


def test_new_when_two_add_entries_to_a_file_at_once_then_it_has_both(tmp_path: Path) -> None:
    path, names = tmp_path / "tokens.json", ("first", "second")
    command = (sys.executable, "-m", "tdserve", "token", "new", "--role", "read", "--file", str(path), "--name")
    assert main([*NEW, "--file", str(path)]) == 0
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        running = [subprocess.Popen([*command, name], stdout=subprocess.DEVNULL) for name in names]
        for each in running:
            wait_for(lambda pid=each.pid: _waits_for_lock(pid), "a command that waits")  # type: ignore[misc]
        assert [entry.grant.name for entry in _read(path)] == ["learner"]
    finally:
        os.close(fd)
    assert [each.wait(60.0) for each in running] == [0, 0]
    assert {entry.grant.name for entry in _read(path)} == {"learner", *names}


def _waits_for_lock(pid: int) -> bool:
    """Returns whether a process waits for a lock of a file."""
    lines = Path("/proc/locks").read_text().splitlines()
    return any("->" in line and f" {pid} " in line for line in lines)


def _read(path: Path) -> list[TokenEntry]:
    return read_entries(parse_document(path.read_bytes(), "file"))


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another user")
def test_new_when_the_file_is_a_link_to_one_of_another_owner_then_both_stay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "secrets").mkdir()
    path, link = tmp_path / "secrets/tokens.json", tmp_path / "tokens.json"
    path.write_text('{"tokens": []}')
    os.chown(path, 1234, 2345)
    path.chmod(0o440)
    link.symlink_to(path)
    assert main([*NEW, "--file", str(link)]) == 0
    found = path.stat()
    assert (found.st_uid, found.st_gid, found.st_mode & 0o777) == (1234, 2345, 0o440)
    assert link.is_symlink()
    assert find(path.read_bytes(), capsys.readouterr().out.strip()) is not None
    assert [each.name for each in path.parent.iterdir()] == ["tokens.json"]


@pytest.mark.parametrize("name", ["tokens.json", "tokens.toml"])
def test_new_when_a_file_is_given_then_the_entry_is_added_and_only_the_token_printed(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    if name == "tokens.toml":
        path.write_text("# ours\ntokens = []\n".replace("tokens = []\n", ""))
        assert main([*NEW, "--file", str(path)]) == 1  # an empty file may be one that is being written
        capsys.readouterr()
        assert main(["token", "new", "--name", "first", "--role", "read", "--held-bytes", "1M"]) == 0
        first = json.loads(capsys.readouterr().out.partition("\n")[2])
        path.write_text(
            f'# ours\n[[tokens]]\nname = "first"\nrole = "read"\nhash = "{first["hash"]}"\nexpires = 2027-01-31\n'
        )
        path.chmod(0o640)
    assert main([*NEW, "--file", str(path), "--sessions", "3", "--stores", 'a"b\\é*']) == 0
    token = capsys.readouterr().out.strip()
    grant = find(path.read_bytes(), token)
    assert grant is not None
    assert (grant.stores, grant.limits.sessions) == (('a"b\\é*',), 3)
    assert path.stat().st_mode & 0o777 == (0o640 if name == "tokens.toml" else 0o600)
    assert token.partition(".")[2] not in path.read_text()
    assert [each.name for each in tmp_path.iterdir()] == [name]
    assert main([*NEW, "--file", str(path)]) == 1  # the name is there already
    assert "two tokens have the name 'learner'" in capsys.readouterr().err
    assert find(path.read_bytes(), token) == grant


@pytest.mark.parametrize(
    "wrong",
    [("--name", "a b"), ("--expires", "soon"), ("--sessions", "0"), ("--held-bytes", "much"), ("--rate", "-1")],
)
def test_new_when_an_option_is_wrong_then_no_token(wrong: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*NEW, *wrong]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "invalid tokens_file" in shown.err


def test_check_when_the_file_is_valid_then_lists_entries_without_hashes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "tokens.json")
    assert main([*NEW, "--file", path, "--expires", "2027-01-31", "--rate", "5"]) == 0
    capsys.readouterr()
    assert main(["token", "check", path, "--json"]) == 0
    (listed,) = json.loads(capsys.readouterr().out)
    assert listed == {
        "name": "learner",
        "role": "write",
        "stores": "*",
        "expires": "2027-01-31T00:00+00:00",
        "limits": "rate 5.0",
    }
    assert main(["token", "check", path]) == 0
    assert "sha256" not in capsys.readouterr().out


@pytest.mark.parametrize("content", [b"{", b"\xff", b"[[tokens]", b"x" * (9 << 20), b'{"tokens": 1}'])
def test_check_when_the_file_is_invalid_then_one_line(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tokens").write_bytes(content)
    assert main(["token", "check", str(tmp_path / "tokens")]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert main(["token", "check", str(tmp_path / "nothing")]) == 1
