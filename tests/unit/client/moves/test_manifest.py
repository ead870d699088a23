from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tdserve.base.errors import CorruptDataError, InvalidRequestError
from tdserve.client.moves.manifest import (
    ArchivedFile,
    ArchivedStore,
    Checkpoint,
    keep_newest,
    list_ids,
    list_with_damage,
    load,
    load_all,
    load_newest,
    make_id,
    read_block,
    save,
    write_block,
)
from tdserve.messages.changed_blocks import MAX_BLOCK_BYTES
from tdserve.store.roots.archive import Archive, open_archive
from tdserve.store.roots.moved_files import compute_digest
from tdserve.v1 import control_pb2


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    return open_archive(tmp_path / "place")


def make_checkpoint(number: int, *contents: bytes) -> Checkpoint:
    files = [
        ArchivedFile((b"rows/\xff%d" % each).hex(), len(content), [compute_digest(content).hex()])
        for each, content in enumerate(contents)
    ]
    moved = control_pb2.MovedStore(record=b"{}", packed=b"\1x")
    store = ArchivedStore("x", "replay", f"{number:032x}", moved.SerializeToString().hex(), files)
    return Checkpoint(make_id(float(number), f"{number:032x}"), float(number), [store], ["adopted"], 0.01, 7)


def add(archive: Archive, number: int, *contents: bytes) -> Checkpoint:
    for content in contents:
        write_block(archive, compute_digest(content).hex(), content)
    made = make_checkpoint(number, *contents)
    save(archive, made)
    return made


def test_checkpoint_when_saved_then_loaded_the_same(archive: Archive) -> None:
    assert load_newest(archive) is None
    made = make_checkpoint(5, b"ab", b"c")
    save(archive, made)
    assert load(archive, made.id) == made == load_newest(archive)
    assert made.stores[0].moved.packed == b"\1x"
    assert made.nbytes == 3


def test_ids_when_made_later_then_come_behind(archive: Archive) -> None:
    made = [add(archive, number).id for number in (10, 5, 2_000_000_000)]
    assert list_ids(archive) == [made[1], made[0], made[2]]
    newest = load_newest(archive)
    assert newest is not None
    assert newest.created_s == 2e9


def test_file_when_its_blocks_are_listed_then_with_offsets_and_sizes() -> None:
    file = ArchivedFile("00", MAX_BLOCK_BYTES + 5, ["a", "b"])
    assert list(file.iter_blocks()) == [(0, MAX_BLOCK_BYTES, "a"), (MAX_BLOCK_BYTES, 5, "b")]


def test_keep_when_older_ones_go_then_blocks_that_others_have_stay(archive: Archive) -> None:
    add(archive, 1, b"old", b"shared")
    kept = add(archive, 2, b"shared", b"new")
    assert len(keep_newest(archive, 1)) == 1
    assert list_ids(archive) == [kept.id]
    for content in (b"shared", b"new"):
        assert read_block(archive, compute_digest(content).hex()) == content
    with pytest.raises(CorruptDataError):
        read_block(archive, compute_digest(b"old").hex())
    assert keep_newest(archive, 1) == []


def test_keep_when_a_place_has_checkpoints_of_another_server_then_those_stay(archive: Archive) -> None:
    made = [replace(add(archive, number), server_id=server_id) for number, server_id in enumerate("abbb")]
    for each in made:
        save(archive, each)
    assert keep_newest(archive, 2, server_id="b") == [made[1].id]
    assert keep_newest(archive, 2, server_id="a") == []
    assert list_ids(archive) == [made[0].id, made[2].id, made[3].id]


def test_manifest_when_it_is_damaged_or_of_another_format_then_refused(archive: Archive, tmp_path: Path) -> None:
    made = add(archive, 1, b"x")
    path = tmp_path / "place/checkpoints" / f"{made.id}.json"
    whole = path.read_bytes()
    for damaged in (whole[:-20], whole.replace(b"replay", b"reploy"), b""):
        path.write_bytes(damaged)
        with pytest.raises(CorruptDataError):
            load(archive, made.id)
    with pytest.raises(CorruptDataError):
        load(archive, "20200101-000000-aaaaaaaa")
    for name in ("../x", "", ".."):
        with pytest.raises(InvalidRequestError):
            load(archive, name)


def test_list_when_a_manifest_is_damaged_then_it_has_that_reason_and_hides_no_other(
    archive: Archive, tmp_path: Path
) -> None:
    made = [add(archive, number, b"x") for number in (1, 2_000_000_000, 3)]
    add(archive, 4)
    (tmp_path / "place/checkpoints" / f"{made[1].id}.json").write_bytes(b"")
    listed = {each.id: each for each in load_all(archive)}
    assert [*listed] == list_ids(archive)
    assert [listed[each.id] for each in (made[0], made[2])] == [made[0], made[2]]
    damaged = listed[made[1].id]
    assert damaged.created_s == 2e9
    assert made[1].id in damaged.damage
    newest = load_newest(archive)
    assert newest is not None
    assert newest.created_s == 4.0


@pytest.mark.parametrize("scheme", ["", "memory://"])
@pytest.mark.parametrize("name", ["zz-note.json", "aside/{}.json", "{}", "{}.json.bak", "{}-copy.json", "x{}.json"])
def test_list_when_a_file_has_no_name_of_a_manifest_then_it_is_no_checkpoint(
    tmp_path: Path, scheme: str, name: str
) -> None:
    archive = open_archive(f"{scheme}{tmp_path}/place")
    ids = [add(archive, number, b"x").id for number in (1, 2)]
    archive.write(f"checkpoints/{name.format(ids[1])}", b"{}")
    assert list_ids(archive) == ids
    assert [each.id for each in list_with_damage(archive) if not each.damage] == ids
    assert keep_newest(archive, 1) == ids[:1]
    assert archive.read(f"checkpoints/{name.format(ids[1])}") == b"{}"


def test_keep_when_a_manifest_is_damaged_then_no_block_goes_and_a_line_of_the_log_names_it(
    archive: Archive, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ids = [add(archive, number, content).id for number, content in enumerate((b"a", b"b", b"c"))]
    (tmp_path / "place/checkpoints" / f"{ids[1]}.json").write_bytes(b"")
    assert keep_newest(archive, 2) == []
    assert caplog.text == ""
    assert keep_newest(archive, 1) == ids[:1]
    assert f"no block is freed at {tmp_path / 'place'}: the manifests of {ids[1]} cannot be read" in caplog.text
    assert read_block(archive, compute_digest(b"a").hex()) == b"a"


def test_list_when_a_block_is_missing_then_every_checkpoint_that_needs_it_is_damaged(
    archive: Archive, tmp_path: Path
) -> None:
    made = [add(archive, number, *contents) for number, contents in enumerate(([b"a", b"b"], [b"b"], [b"b", b"c"]))]
    assert list_with_damage(archive) == made
    for content in (b"a", b"c"):
        digest = compute_digest(content).hex()
        (tmp_path / "place/blocks" / digest[:2] / digest).unlink()
    first, second, third = list_with_damage(archive)
    assert second == made[1]
    assert first == replace(made[0], damage="one of its blocks is missing, of store 'x'")
    assert third.damage == first.damage
    write_block(archive, compute_digest(b"c").hex(), b"c")
    assert [each.damage == "" for each in list_with_damage(archive)] == [False, True, True]


@pytest.mark.parametrize("scheme", ["", "memory://"])
def test_list_when_a_block_is_cut_short_then_every_checkpoint_that_needs_it_is_damaged(
    tmp_path: Path, scheme: str
) -> None:
    archive = open_archive(f"{scheme}{tmp_path}/place")
    made = [add(archive, number, *contents) for number, contents in enumerate(([b"aa", b"b"], [b"b"], [b"b", b"cc"]))]
    assert list_with_damage(archive) == made
    write_block(archive, compute_digest(b"aa").hex(), b"a")
    first, second, third = list_with_damage(archive)
    assert first == replace(made[0], damage="one of its blocks is of another size, of store 'x'")
    assert [second, third] == made[1:]
    archive.remove(f"blocks/{compute_digest(b'b').hex()[:2]}/{compute_digest(b'b').hex()}")
    damage = [each.damage.partition(",")[0] for each in list_with_damage(archive)]
    assert damage == ["2 of its blocks are missing or of another size", *["one of its blocks is missing"] * 2]
    for content in (b"aa", b"b"):
        write_block(archive, compute_digest(content).hex(), content)
    assert list_with_damage(archive) == made


@pytest.mark.parametrize("scheme", ["", "memory://"])
def test_keep_when_newer_ones_are_not_whole_then_the_newest_whole_ones_stay_and_these_beside(
    tmp_path: Path, scheme: str
) -> None:
    archive = open_archive(f"{scheme}{tmp_path}/place")
    ids = [add(archive, number, content).id for number, content in enumerate((b"a", b"b", b"cut", b"cut"), 1)]
    write_block(archive, compute_digest(b"cut").hex(), b"")
    assert keep_newest(archive, 2) == []
    assert keep_newest(archive, 1) == [ids[0]]
    assert list_ids(archive) == ids[1:]
    assert read_block(archive, compute_digest(b"b").hex()) == b"b"
    write_block(archive, compute_digest(b"cut").hex(), b"cut")
    assert keep_newest(archive, 1) == ids[1:3]
    assert read_block(archive, compute_digest(b"cut").hex()) == b"cut"


def test_blocks_when_copies_lie_in_other_folders_then_they_count_for_nothing(archive: Archive) -> None:
    made = add(archive, 1, b"a")
    digest = compute_digest(b"a").hex()
    archive.write(f"blocks/zz-aside/{digest}", b"")
    assert list_with_damage(archive) == [made]
    archive.remove(f"blocks/{digest[:2]}/{digest}")
    assert "missing" in list_with_damage(archive)[0].damage


def test_block_when_its_content_is_another_then_refused(archive: Archive, tmp_path: Path) -> None:
    digest = compute_digest(b"content").hex()
    write_block(archive, digest, b"contemt")
    with pytest.raises(CorruptDataError, match=digest):
        read_block(archive, digest)
