"""``tdserve check``: what it prints, and its exit codes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tdserve.cli.main import main
from tdserve.store.roots.root import Root
from tests.roots import make_quick_root
from tests.stored_root.unpacking import unpack_root


@pytest.fixture
def root() -> Iterator[Path]:
    """A copy of the stored root."""
    with make_quick_root() as folder:
        yield unpack_root(folder / "root")


def damage(root: Path) -> None:
    path = root / "stores/replay/rows/x.memmap"
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)


def test_check_when_whole_then_exits_with_0(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(root)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "all is whole"
    assert main(["check", str(root), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["findings"] == []


def test_check_when_damaged_then_exits_with_8_and_with_0_once_it_is_repaired(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(root)
    assert main(["check", str(root)]) == 8
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("damage: store 'replay': stores/replay: ")
    assert lines[0].endswith("(1 rows: 0)")
    assert "--repair" in lines[-1]
    assert main(["check", str(root), "--json"]) == 8
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert (finding["store"], finding["rows"], finding["repaired"]) == ("replay", [0], "")
    assert main(["check", str(root), "--repair"]) == 0
    assert "1 rows were dropped" in capsys.readouterr().out
    assert main(["check", str(root)]) == 0


def test_check_when_a_store_is_in_no_catalog_then_exits_with_8_until_its_folder_has_gone(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "stores/strange/rows").mkdir(parents=True)
    for option, hint in (([], "; --repair repairs what can be"), (["--repair"], ""), (["--repair"], ""), ([], "")):
        assert main(["check", str(root), *option]) == 8
        *others, rest, last = capsys.readouterr().out.splitlines()
        assert (rest, last) == ("all else is whole", f"1 store is not in service{hint}")
        assert not any(line.startswith("repaired: ") for line in others)
    assert main(["check", str(root), "--json"]) == 8
    found = json.loads(capsys.readouterr().out)
    assert (found["num_not_served"], found["findings"][0]["is_not_served"]) == (1, True)
    (left,) = (root / "stores").glob(".lost-*")
    shutil.rmtree(left)
    assert main(["check", str(root)]) == 0


def test_check_when_it_cannot_be_then_one_line_and_its_code(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    held = Root.acquire(root)
    assert main(["check", str(root)]) == 6
    held.release()
    assert main(["check", str(root / "nowhere")]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 2
