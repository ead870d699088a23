"""The shell commands against a live server: they show what was stored."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.cli.main import main
from tdserve.cli.shell.exit_codes import NO_ANSWER, NOT_FOUND, REFUSED
from tests.integration.shell import Shell
from tests.roots import make_quick_root

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
NUM_TRANSITIONS = 12


def transitions(num_rows: int) -> TensorDict:
    """Rows whose content says which row they are."""
    number = torch.arange(num_rows)
    obs = number[:, None] + torch.tensor([0.0, 0.5])
    return TensorDict({"obs": obs, "next": {"done": number % 2 == 0}}, [num_rows])


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with one store of each kind."""
    with make_quick_root() as root, tdserve.Server(root, port=0) as server:
        with tdserve.connect(server.address) as client:
            client.init_remote(TensorDict({"a.b": torch.arange(3), "tag": "x\x1b[2J"}, [3]), "plain")
            client.init_remote(TensorDict({"scalar": torch.tensor(2.5)}, []), "scalar")
            replay = client.create_replay("replay", like=transitions(1)[0], capacity=100)
            replay.extend(transitions(NUM_TRANSITIONS))
            client.create_kv("keyed").put(
                ["a", "b", "c"], [torch.arange(2), TensorDict({"x": torch.tensor(1)}, []), {"d": 1}]
            )
            client.publish("policy", TensorDict({"weight": torch.ones(2, 2)}, []), metadata={"step": 10})
        yield server.address


@pytest.fixture
def shell(address: str, capsys: pytest.CaptureFixture[str]) -> Shell:
    """A shell whose commands reach the live server."""
    return Shell(address, capsys)


def test_ls_when_server_is_live_then_lists_every_store(shell: Shell) -> None:
    assert shell.lines("ls") == ["keyed", "plain", "policy", "replay", "scalar"]
    assert shell.json("ls") == ["keyed", "plain", "policy", "replay", "scalar"]
    assert shell.lines("ls", "--kind", "weights", "--kind", "replay") == ["policy", "replay"]
    assert shell.lines("ls", "--kind", "kv,weights", "--kind", "replay, queue") == ["keyed", "policy", "replay"]
    assert shell.lines("ls", "--kind", "dataset") == shell.lines("ls", "--kind", "store") == ["plain", "scalar"]
    assert shell.json("ls", "--kind", "queue") == []
    assert [each["name"] for each in shell.json("ls", "-l", "--kind", "tensordict")] == ["plain", "scalar"]
    assert [line.split()[0] for line in shell.lines("ls", "-l", "--kind", "keyed")][-1] == "keyed"


def test_ls_when_long_then_shows_kind_and_rows(shell: Shell) -> None:
    table = {line.split()[0]: line.split()[1:3] for line in shell.lines("ls", "--long")}
    assert table["replay"] == ["replay", str(NUM_TRANSITIONS)]
    assert table["plain"] == ["tensordict", "3"]
    found = {store["name"]: store for store in shell.json("ls", "--long")}
    assert found["replay"]["capacity"] == 100
    assert found["policy"]["version"] == 1


def test_keys_when_nested_then_are_tuples_or_lists(shell: Shell) -> None:
    assert set(shell.lines("keys", "replay")) == {"obs", "next", "('next', 'done')"}
    assert shell.json("keys", "replay", "--leaves-only", "--sort") == [["next", "done"], "obs"]
    assert shell.lines("keys", "replay", "--root-only", "--sort") == ["next", "obs"]


def test_keys_when_the_store_is_keyed_then_those_of_its_entries(shell: Shell) -> None:
    assert shell.lines("keys", "keyed") == ["a", "b", "c"]
    assert shell.json("keys", "keyed") == ["a", "b", "c"]


def test_keys_when_long_then_have_type_and_shape(shell: Shell) -> None:
    found = {str(entry["key"]): entry["type"] for entry in shell.json("keys", "replay", "--long")}
    assert found == {"obs": "float32", "next": "tensordict", "['next', 'done']": "bool"}


def test_head_when_replay_then_shows_live_rows_without_sampling(shell: Shell) -> None:
    before = shell.json("info", "replay")["samples"]
    shown = shell.json("head", "replay", "-n", "2")
    assert shown["batch_size"] == [2]
    assert shown["data"] == {"obs": [[0.0, 0.5], [1.0, 1.5]], "next": {"done": [True, False]}}
    assert shell.json("info", "replay")["samples"] == before


def test_head_when_store_is_plain_then_shows_tensors_and_values_without_control_characters(shell: Shell) -> None:
    text = "\n".join(shell.lines("head", "plain"))
    assert "\x1b" not in text
    assert "'x\\x1b[2J'" in text
    assert shell.json("head", "plain", "-n", "2")["data"]["a.b"] == [0, 1]


def test_head_when_store_has_no_batch_dimension_then_shows_its_one_value(shell: Shell) -> None:
    assert shell.json("head", "scalar")["data"] == {"scalar": 2.5}


def test_head_when_weights_then_shows_the_newest_version(shell: Shell) -> None:
    assert shell.json("head", "policy")["data"] == {"weight": [[1.0, 1.0], [1.0, 1.0]]}


def test_head_when_keyed_then_shows_the_first_entries(shell: Shell) -> None:
    assert shell.json("head", "keyed", "-n", "3")["data"] == {"a": [0, 1], "b": {"x": 1}, "c": {"d": 1}}
    assert shell.json("head", "keyed", "-n", "1")["data"] == {"a": [0, 1]}
    assert shell.json("info", "keyed")["num_rows"] == 3


def test_info_when_replay_then_has_settings_and_counts(shell: Shell) -> None:
    facts = shell.json("info", "replay")
    assert {name: facts[name] for name in ("name", "kind", "num_rows", "capacity", "inserts")} == {
        "name": "replay",
        "kind": "replay",
        "num_rows": NUM_TRANSITIONS,
        "capacity": 100,
        "inserts": NUM_TRANSITIONS,
    }
    assert any("float32" in line for line in shell.lines("info", "replay"))


def test_info_when_no_name_then_has_figures_of_the_server(shell: Shell) -> None:
    assert shell.json("info")["num_stores"] == 5
    assert any(line.split()[:2] == ["num_stores", "5"] for line in shell.lines("info"))


@pytest.mark.parametrize("command", ["keys", "head", "info"])
def test_command_when_store_is_unknown_then_one_line_names_it(shell: Shell, command: str) -> None:
    assert "there is no store 'nothing'" in shell.error(NOT_FOUND, command, "nothing")


def test_command_when_address_is_from_the_environment_then_reaches_it(
    address: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TDSERVE_ADDRESS", address)
    assert main(["ls"]) == 0
    assert "replay" in capsys.readouterr().out


@pytest.mark.slow
def test_command_when_no_server_listens_then_one_line_names_the_address(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", "--address", "127.0.0.1:1"]) == NO_ANSWER
    error = capsys.readouterr().err
    assert "127.0.0.1:1" in error
    assert error.count("\n") == 1


def test_command_when_the_token_is_needed_then_its_file_opens_the_door(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "token").write_text("secret\n")
    with tdserve.Server(str(tmp_path / "root"), port=0, token_file=str(tmp_path / "token")).start() as server:
        assert main(["ls", "--address", server.address, "--token-file", str(tmp_path / "token")]) == 0
        assert main(["ls", "--address", server.address]) == REFUSED
    assert "token" in capsys.readouterr().err


@pytest.mark.slow
def test_ls_when_run_in_a_process_of_its_own_then_torch_is_not_imported(address: str) -> None:
    program = f"import sys; from tdserve.cli.main import main; main(['ls', '--address', '{address}'])"
    program += "; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["keyed", "plain", "policy", "replay", "scalar", "False"]
