"""``tdserve check`` of a place of checkpoints: what it prints, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tdserve.cli.main import main
from tdserve.cli.shell.exit_codes import DAMAGED
from tdserve.client.moves.manifest import ArchivedFile, ArchivedStore, Checkpoint, make_id, save, write_block
from tdserve.store.roots.archive import open_archive
from tdserve.store.roots.moved_files import compute_digest

OLD, NEW = b"content of before", b"content of now"
IDS = [make_id(float(number), "ab" * 16) for number in range(3)]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Three checkpoints: the first two have content that the third, and their other store, have not."""
    for number, content in enumerate((OLD, OLD, NEW)):
        save_checkpoint(tmp_path / "place", number, changed=content, steady=NEW)
    return tmp_path / "place"


def save_checkpoint(place: Path, number: int, **contents: bytes) -> None:
    archive, stores = open_archive(place), []
    for name, content in contents.items():
        digest = compute_digest(content).hex()
        write_block(archive, digest, content)
        stores.append(ArchivedStore(name, "replay", "0" * 32, "", [ArchivedFile("00", len(content), [digest])]))
    save(archive, Checkpoint(IDS[number], float(number), stores))


def find_block(place: Path, content: bytes) -> Path:
    digest = compute_digest(content).hex()
    return place / "blocks" / digest[:2] / digest


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main([*arguments])
    return code, *capsys.readouterr()


def test_check_when_only_older_checkpoints_have_the_damaged_block_then_named_until_their_manifests_go(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, "check", str(place))[0] == 0
    find_block(place, OLD).write_bytes(b"damaged")
    code, shown, _ = run(capsys, "check", str(place))
    assert code == DAMAGED
    for number in (0, 1):
        assert f"checkpoint {IDS[number]} cannot be restored: it lacks blocks of changed\n" in shown
    assert IDS[2] not in shown
    assert "whole checkpoints beside: 1\n" in shown
    assert "--repair removes what is damaged; a later checkpoint writes a block again only if" in shown
    for arguments in (["--repair"], []):  # the second finds nothing that a repair could remove
        code, shown, _ = run(capsys, "check", str(place), *arguments)
        assert code == DAMAGED
        assert "--repair" not in shown
        assert shown.endswith(f"  {place}/checkpoints/{IDS[0]}.json\n  {place}/checkpoints/{IDS[1]}.json\n")
    lost = json.loads(run(capsys, "check", str(place), "--json")[1])["lost"]
    assert [(each["id"], each["stores"]) for each in lost] == [(each, ["changed"]) for each in IDS[:2]]
    for each in lost:
        Path(each["manifest"]).unlink()
    assert run(capsys, "check", str(place))[0] == 0


def test_list_when_a_repair_has_removed_a_block_then_its_checkpoints_are_damaged_until_it_is_there_again(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    find_block(place, OLD).write_bytes(b"damaged")
    run(capsys, "check", str(place), "--repair")
    code, shown, errors = run(capsys, "checkpoint", str(place), "--list")
    assert code == DAMAGED
    assert [line.rstrip().endswith("damaged") for line in shown.splitlines()[1:]] == [True, True, False]
    assert errors.splitlines()[1].startswith(
        f"{IDS[1]} cannot be restored: one of its blocks is missing, of store 'changed'; tdserve check"
    )
    write_block(open_archive(place), compute_digest(OLD).hex(), OLD)
    assert run(capsys, "checkpoint", str(place), "--list")[0] == 0
    assert run(capsys, "check", str(place))[0] == 0


def test_check_when_a_manifest_is_damaged_then_a_repair_removes_it(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "checkpoints" / f"{IDS[0]}.json").write_bytes(b"damaged")
    code, shown, _ = run(capsys, "check", str(place))
    assert (code, f"{IDS[0]} cannot be restored: its manifest is damaged\n" in shown) == (DAMAGED, True)
    assert "--repair removes what is damaged" in shown
    assert run(capsys, "check", str(place), "--repair")[0] == DAMAGED
    assert run(capsys, "check", str(place))[0] == 0


def test_place_of_a_cluster_when_one_server_has_none_any_more_then_those_of_the_others_are_checked_and_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "of-cluster"
    for server in (1, 10):
        save_checkpoint(place / f"server-{server}", 0, changed=OLD)
    (place / "server-0/checkpoints").mkdir(parents=True)
    (place / "server-x").mkdir()
    code, shown, _ = run(capsys, "check", str(place))
    assert (code, shown.partition(",")[0]) == (0, "2 checkpoints")
    find_block(place / "server-10", OLD).write_bytes(b"damaged")
    for named in (str(place), f"file://{place}"):
        assert run(capsys, "check", named)[0] == DAMAGED
    listed = json.loads(run(capsys, "checkpoint", "--list", "--json", str(place))[1])
    assert [each["server"] for each in listed] == [1, 10]
