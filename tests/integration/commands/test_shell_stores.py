"""Commands that change stores or show figures; exit codes; completion in a shell."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.cli.main import main
from tdserve.cli.shell.exit_codes import CONFLICT, NO_ANSWER, NOT_FOUND, REFUSED
from tests.integration.shell import Shell
from tests.integration.terminal import run_on_terminal
from tests.processes import REPOSITORY, quiet_port

pytestmark = pytest.mark.integration


def fill(client: tdserve.Client, *names: str) -> None:
    """Makes small stores."""
    for name in names:
        client.init_remote(TensorDict({"a": torch.arange(3)}, [3]), name)


def test_rm_when_stores_exist_then_deleted_in_order(client: tdserve.Client, shell: Shell) -> None:
    fill(client, "a", "b\u202e", "c")
    assert shell.lines("rm", "a", "b\u202e") == ["deleted a", "deleted b\\u202e"]
    assert client.stores() == ["c"]
    assert "there is no store 'a'" in shell.error(NOT_FOUND, "rm", "a", "c")
    assert client.stores() == ["c"]
    assert shell.json("rm", "a", "c", "--missing-ok") == {"deleted": ["c"]}
    assert client.stores() == []


def test_rm_when_keys_are_given_then_only_those_entries(client: tdserve.Client, shell: Shell) -> None:
    kv = client.create_kv("keyed")
    kv.put(["a", "b", "c"], [torch.arange(2)] * 3)
    assert shell.lines("rm", "keyed", "--key", "a", "--key", "b") == ["deleted a", "deleted b"]
    assert kv.keys() == ["c"]
    assert "'a'" in shell.error(NOT_FOUND, "rm", "keyed", "--key", "a")
    fill(client, "plain")
    assert "not a keyed store" in shell.error(CONFLICT, "rm", "plain", "--key", "a")


def test_versions_when_kept_then_listed_with_metadata(client: tdserve.Client, shell: Shell) -> None:
    for step in range(3):
        client.publish("policy", TensorDict({"w": torch.ones(3)}, []), metadata={"step": step}, keep=3)
    table = [line.split() for line in shell.lines("versions", "policy")]
    assert [(row[0], row[-2:]) for row in table[1:]] == [(str(n + 1), ["step", str(n)]) for n in range(3)]
    assert [(each["version"], each["metadata"]) for each in shell.json("versions", "policy")] == [
        (n + 1, {"step": n}) for n in range(3)
    ]
    fill(client, "plain")
    assert "only weights have versions" in shell.error(CONFLICT, "versions", "plain")


def test_head_when_entries_are_chats_then_their_text(client: tdserve.Client, shell: Shell) -> None:
    client.create_kv("chats")["c0"] = {"id": 3, "messages": [{"role": "user", "content": "hello there"}]}
    assert any("id: 3 | user: hello there" in line for line in shell.lines("head", "chats"))
    assert shell.json("head", "chats")["data"]["c0"]["messages"][0]["content"] == "hello there"


def test_stats_when_asked_then_figures_of_the_server(client: tdserve.Client, shell: Shell, tmp_path: Path) -> None:
    fill(client, "plain")
    assert shell.json("stats")["num_stores"] == 1
    assert any(line.split()[:2] == ["num_stores", "1"] for line in shell.lines("stats"))
    assert not any(line.startswith("checkpoint") for line in shell.lines("stats"))  # there is none
    client.checkpoint(str(tmp_path))
    assert any(line.startswith("checkpoint_age_s ") for line in shell.lines("stats"))


@pytest.mark.slow
def test_commands_when_they_fail_then_exit_codes_differ(
    client: tdserve.Client, server: tdserve.Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(client, "plain")
    TensorDict({"a": torch.arange(3)}, [3]).memmap(tmp_path / "folder")
    here = ("--address", server.address)
    assert main(["info", "nothing", *here]) == NOT_FOUND
    assert main(["adopt", str(tmp_path / "folder"), "plain", *here]) == CONFLICT
    assert main(["ls", "--address", f"127.0.0.1:{quiet_port()}"]) == NO_ANSWER
    assert main(["rm", *here]) == 2
    (tmp_path / "token").write_text("secret")
    with tdserve.Server(tmp_path / "root", token_file=str(tmp_path / "token")) as closed:
        assert main(["stats", "--address", closed.address]) == REFUSED
        shown = capsys.readouterr().err
        assert "needs a token, and none was given" in shown
        assert all(way in shown for way in ("--token-file", "TDSERVE_TOKEN_FILE", "TDSERVE_TOKEN"))
        assert main(["stats", "--address", closed.address, "--token-file", str(tmp_path / "none")]) == REFUSED
    assert capsys.readouterr().out == ""


def complete(words: str, **variables: str) -> list[str]:
    """What bash's script gets for the last word of a command line."""
    done = subprocess.run(
        [sys.executable, "-c", "import sys; from tdserve.cli.main import main; sys.exit(main([]))"],
        cwd=REPOSITORY,
        env={
            **os.environ,
            "_TDSERVE_COMPLETE": "bash_complete",
            "COMP_WORDS": words,
            "COMP_CWORD": str(len(words.split(" ")) - 1),
            **variables,
        },
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    return [line.partition(",")[2] for line in done.stdout.split()]


@pytest.mark.slow
def test_completion_when_a_store_is_begun_then_the_names_of_stores(
    client: tdserve.Client, server: tdserve.Server
) -> None:
    fill(client, "alpha", "alpine", "beta", "al\u202epha")
    assert complete("tdserve head al", TDSERVE_ADDRESS=server.address) == ["alpha", "alpine"]
    assert complete(f"tdserve rm --address {server.address} b") == ["beta"]
    assert complete("tdserve ver", TDSERVE_ADDRESS=server.address) == ["version", "versions"]


@pytest.mark.full
def test_completion_when_no_server_answers_then_nothing(tmp_path: Path) -> None:
    assert complete("tdserve head al", TDSERVE_ADDRESS=f"127.0.0.1:{quiet_port()}") == []
    assert complete("tdserve head al", TDSERVE_TOKEN_FILE=str(tmp_path / "none")) == []


@pytest.mark.parametrize("shell_name", ["bash", "zsh", "fish"])
def test_completion_when_asked_then_the_script_of_the_shell(
    shell_name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", shell_name]) == 0
    assert "_TDSERVE_COMPLETE" in capsys.readouterr().out


def test_version_when_asked_then_of_all_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    shown = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert shown["torch"].strip() == torch.__version__.partition("+")[0] or shown["torch"].strip() == torch.__version__
    assert {"tdserve", "python", "protocol"} <= shown.keys()


NESTED = TensorDict({"next": {"obs": torch.zeros(3, 4)}, "done": torch.zeros(3, dtype=torch.bool)}, [3])


@pytest.mark.slow
def test_structure_when_on_a_terminal_then_a_tree(
    client: tdserve.Client, server: tdserve.Server, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.init_remote(NESTED, "store")
    client.create_kv("keyed")["a/b"] = 1
    with run_on_terminal("info", "store", "--address", server.address) as terminal:
        assert terminal.process.wait(timeout=60) == 0
        shown = re.sub(r"\x1b\[[0-9;]*m", "", terminal.read())
    assert "├── next  tensordict  [3]\r\n│   └── obs  float32  [3, 4]  48 B\r\n└── done  bool  [3]  3 B\r\n" in shown
    assert shell.lines("keys", "store") == ["('next', 'obs')", "next", "done"]
    monkeypatch.setenv("TTY_COMPATIBLE", "1")  # rich takes the output for a terminal
    monkeypatch.setenv("NO_COLOR", "1")
    for options in ((), ("--sort",), ("-l",)):
        lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in shell.lines("keys", "store", *options)]
        assert lines[0] == "store"
        assert sorted(len(line) - len(line.lstrip("│ ├└─")) for line in lines[1:]) == [4, 4, 8]
        assert ("float32" in "".join(lines)) == (options == ("-l",))
        assert (lines[1].endswith("done")) == (options == ("--sort",))
    assert shell.lines("keys", "store", "--root-only") == ["next", "done"]
    assert shell.lines("keys", "keyed") == ["a/b"]
    assert shell.json("keys", "store") == [["next", "obs"], "next", "done"]


def test_spec_when_any_command_prints_json_then_of_one_form(
    client: tdserve.Client, shell: Shell, tmp_path: Path
) -> None:
    client.init_remote(NESTED, "store")
    spec = shell.json("info", "store")["spec"]
    assert spec["batch_size"] == [3]
    assert spec["keys"] == shell.json("keys", "store", "-l")
    assert {"key": ["next", "obs"], "type": "float32", "shape": [3, 4], "nbytes": 48} in spec["keys"]
    shell.lines("get", "store", str(tmp_path / "folder"))
    assert shell.json("put", str(tmp_path / "folder"), "copy")["spec"] == shell.json("info", "copy")["spec"]
    table = client.create_replay("table", like=NESTED[0], capacity=3)
    assert table.info()["spec"] == shell.json("info", "table")["spec"]
