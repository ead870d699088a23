from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.base.errors import CorruptDataError, InvalidRequestError, RootInUseError, StoreExistsError
from tdserve.cli.main import main
from tdserve.cli.shell.exit_codes import EXIT_CODES, FAILED
from tdserve.store.roots.root import Root
from tests.integration.shell import Shell
from tests.processes import REPOSITORY, wait_for

pytestmark = pytest.mark.integration


def fill(client: tdserve.Client) -> None:
    client.memmap(TensorDict({"x": torch.arange(4)}, [4]), "content")
    client.create_replay("table", TensorDict({"n": torch.tensor(0)}, []), 10).extend(
        TensorDict({"n": torch.arange(3)}, [3])
    )


@pytest.mark.slow
def test_checkpoint_when_written_then_listed_and_restored_beside(
    client: tdserve.Client, shell: Shell, tmp_path: Path
) -> None:
    fill(client)
    place = str(tmp_path / "place")
    (line,) = shell.lines("checkpoint", place)
    assert "2 stores" in line
    client.replay("table").extend(TensorDict({"n": torch.arange(3)}, [3]))
    (second,) = shell.json("checkpoint", place)
    assert second["stores"] == ["content", "table"]
    listed = shell.json("checkpoint", place, "--list")
    assert [each["id"] for each in listed] == [line.partition(":")[0], second["id"]]
    assert listed[0]["id"] in " ".join(shell.lines("checkpoint", place, "--list"))
    options = ("--checkpoint", listed[0]["id"], "--prefix", "old-")
    assert shell.lines("restore", place, "table", *options) == ["old-table"]
    assert len(client.replay("old-table")) == 3
    shell.lines("checkpoint", place, "--keep", "1")
    assert len(shell.json("checkpoint", place, "--list")) == 1


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_checkpoint_when_the_place_to_be_listed_is_misspelt_then_an_error_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], scheme: str
) -> None:
    empty = tmp_path / "place"
    empty.mkdir()
    assert main(["checkpoint", f"{scheme}{empty}", "--list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
    assert main(["checkpoint", f"{scheme}{tmp_path}/plaec", "--list"]) == 1
    shown = capsys.readouterr()
    assert (shown.out, "/plaec, so that no checkpoint was ever written to it" in shown.err) == ("", True)
    assert tdserve.list_checkpoints(f"{scheme}{tmp_path}/plaec") == []


@pytest.mark.slow
def test_restore_when_into_a_root_then_a_server_has_the_stores(
    client: tdserve.Client, shell: Shell, tmp_path: Path
) -> None:
    fill(client)
    shell.lines("checkpoint", str(tmp_path / "place"))
    found = shell.json("restore", str(tmp_path / "place"), "--root", str(tmp_path / "root"))
    assert found == ["content", "table"]
    with tdserve.Server(tmp_path / "root").start() as server, server.client() as restored:
        assert len(restored.replay("table")) == 3
        assert restored["content"]["x"].tolist() == [0, 1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("exists", [False, True])
def test_restore_when_into_a_root_fails_then_nothing_is_left_and_the_next_one_succeeds(
    client: tdserve.Client, shell: Shell, tmp_path: Path, exists: bool
) -> None:
    fill(client)
    place, roots = tmp_path / "place", tmp_path / "roots"
    shell.lines("checkpoint", str(place))
    blocks = [path for path in (place / "blocks").rglob("*") if path.is_file()]
    contents = [path.read_bytes() for path in blocks]
    for path in blocks:
        path.write_bytes(b"damaged")
    roots.mkdir()
    if exists:  # a new volume
        (roots / "root" / "lost+found").mkdir(parents=True)
    before = list(roots.rglob("*"))
    options = ("restore", str(place), "--root", str(roots / "root"))
    assert "blocks" in shell.error(EXIT_CODES[CorruptDataError.code], *options)
    assert list(roots.rglob("*")) == before
    for path, content in zip(blocks, contents, strict=True):
        path.write_bytes(content)
    assert shell.lines(*options) == ["content", "table"]
    assert not any(path.name.startswith(".") for path in (roots / "root").iterdir())


@pytest.mark.full
def test_restore_when_into_a_root_is_killed_then_no_server_starts_there_until_the_next_one_has_succeeded(
    client: tdserve.Client, shell: Shell, tmp_path: Path
) -> None:
    fill(client)
    place, root = tmp_path / "place", tmp_path / "root"
    shell.lines("checkpoint", str(place))
    block = next(path for path in (place / "blocks").rglob("*") if path.is_file())
    content = block.read_bytes()
    block.unlink()
    os.mkfifo(block)  # the restore waits for its content
    command = [sys.executable, "-m", "tdserve", "restore", str(place), "--root", str(root)]
    with subprocess.Popen(command, cwd=REPOSITORY) as restore:
        wait_for((root / ".restoring" / "tdserve.json").exists, "the server of the restore")
        restore.kill()
    block.unlink()
    block.write_bytes(content)
    with pytest.raises(tdserve.TDServeError, match=f"a restore into {root} .* was interrupted"):
        tdserve.Server(root).start()
    wait_for(lambda: is_free(root / ".restoring"), "the end of the server of the restore")
    assert shell.lines("restore", str(place), "--root", str(root)) == ["content", "table"]
    with tdserve.Server(root).start() as server, server.client() as restored:
        assert restored.stores() == ["content", "table"]


def is_free(root: Path) -> bool:
    try:
        Root.acquire_for_check(root).release()
    except RootInUseError:
        return False
    return True


def test_restore_when_a_name_is_taken_or_there_is_no_checkpoint_then_one_line_and_its_code(
    client: tdserve.Client, shell: Shell, tmp_path: Path
) -> None:
    fill(client)
    shell.lines("checkpoint", str(tmp_path / "place"))
    exists, invalid = EXIT_CODES[StoreExistsError.code], EXIT_CODES.get(InvalidRequestError.code, FAILED)
    assert "content" in shell.error(exists, "restore", str(tmp_path / "place"))
    assert "has no checkpoint" in shell.error(invalid, "restore", str(tmp_path / "nowhere"))
    assert "has no checkpoint 'x'; it has 2" in shell.error(
        invalid, "restore", str(tmp_path / "place"), "--checkpoint", "x"
    )
    assert "empty" in shell.error(invalid, "checkpoint", "")
    assert "of this command" in shell.error(2, "checkpoint", "memory://x")
