from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from tdserve.base.errors import InvalidRequestError
from tdserve.messages.changed_blocks import MAX_BLOCK_BYTES
from tdserve.store.roots.moved_files import (
    Block,
    compute_digest,
    copy_blocks,
    list_files,
    read_blocks,
    set_files,
    sync_files,
    write_blocks,
)
from tests.errors import raises


def test_files_when_read_in_blocks_and_written_then_the_same(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    contents = {b"rows/a.memmap": bytes(range(256)) * 40, b"generation.memmap": b"12345678", b"rows/empty": b""}
    for path, content in contents.items():
        (source / path.decode()).parent.mkdir(parents=True, exist_ok=True)
        (source / path.decode()).write_bytes(content)
    assert list_files(source) == {path: len(content) for path, content in contents.items()}
    set_files(target, list_files(source))
    for path, content in contents.items():
        for offset in range(0, len(content), 1000):
            block = Block(path, offset, min(1000, len(content) - offset))
            ((digest, found),) = read_blocks(source, [block], max_bytes=1 << 20)
            assert found == content[offset : offset + 1000]
            assert digest == compute_digest(content[offset : offset + 1000])
            write_blocks(target, [Block(path, offset, len(found), content=found)])
    sync_files(target)
    assert {path: (target / path.decode()).read_bytes() for path in contents} == contents


def test_list_when_files_concern_this_server_alone_then_without_them(tmp_path: Path) -> None:
    own = (
        "claims/1",
        "staging/put-0",
        "objects/lock.mdb",
        "synced-values/data.mdb",
        "synced-values.new/data.mdb",
        "record.json",
    )
    unfinished = ("synced.memmap.new", "rows/meta.json.new")  # they are about to vanish
    for path in (*own, *unfinished, "objects/data.mdb", "rows/claims", "rows/record.json"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(b"x")
    assert sorted(list_files(tmp_path)) == [b"objects/data.mdb", b"rows/claims", b"rows/record.json"]


def test_read_when_the_content_is_known_then_left_out_and_when_it_is_much_then_the_first(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 30)
    known = compute_digest(b"x" * 10)
    blocks = [Block(b"a", 0, 10, known), Block(b"a", 10, 10), Block(b"a", 20, 10), Block(b"gone", 0, 4)]
    found = read_blocks(tmp_path, blocks, max_bytes=1000)
    assert [content for _, content in found] == [None, b"x" * 10, b"x" * 10, bytes(4)]
    assert len(read_blocks(tmp_path, blocks, max_bytes=10)) == 2


def test_read_when_a_large_file_is_mostly_unwritten_then_the_same_as_if_it_were_read(tmp_path: Path) -> None:
    num_blocks = 64
    set_files(tmp_path, {b"a": num_blocks * MAX_BLOCK_BYTES})
    written = {3: (5, b"early"), 40: (MAX_BLOCK_BYTES - 4, b"late")}  # the second one right at the end
    with open(tmp_path / "a", "r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        for number, (at, content) in written.items():
            mapped[number * MAX_BLOCK_BYTES + at : number * MAX_BLOCK_BYTES + at + len(content)] = content
        blocks = [Block(b"a", number * MAX_BLOCK_BYTES, MAX_BLOCK_BYTES) for number in range(num_blocks)]
        found = read_blocks(tmp_path, blocks, max_bytes=1 << 30)  # while pages have not reached the disk
        expected = [mapped[block.offset : block.offset + block.nbytes] for block in blocks]
    assert [content for _, content in found] == expected
    assert [digest for digest, _ in found] == [compute_digest(content) for content in expected]


def test_files_when_set_anew_then_just_these_and_new_bytes_zero(tmp_path: Path) -> None:
    set_files(tmp_path, {b"a": 4, b"b/c": 2})
    write_blocks(tmp_path, [Block(b"a", 0, 4, content=b"abcd")])
    set_files(tmp_path, {b"a": 6})
    assert list_files(tmp_path) == {b"a": 6}
    assert (tmp_path / "a").read_bytes() == b"abcd\0\0"


def test_copy_when_a_file_of_a_store_at_rest_vanishes_then_the_others_are_copied(tmp_path: Path) -> None:
    (tmp_path / "2.safetensors").write_bytes(b"content")  # the version before was retired since it was listed
    copy_blocks(tmp_path, tmp_path / "kept", {b"1.safetensors": [0], b"2.safetensors": [0]})
    assert list_files(tmp_path / "kept") == {b"2.safetensors": 7}
    ((_, found),) = read_blocks(tmp_path / "kept", [Block(b"1.safetensors", 0, 4)], max_bytes=1 << 20)
    assert found == bytes(4)


@pytest.mark.parametrize("path", [b"", b"/etc/passwd", b"../a", b"a/../../b", b"a//b", b"a\0b", b"x" * 5000])
def test_path_when_it_leads_elsewhere_then_refused(tmp_path: Path, path: bytes) -> None:
    for call in (
        lambda: set_files(tmp_path, {path: 1}),
        lambda: write_blocks(tmp_path, [Block(path, 0, 1, content=b"x")]),
        lambda: read_blocks(tmp_path, [Block(path, 0, 1)], max_bytes=1),
    ):
        with pytest.raises(InvalidRequestError):
            call()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", [b"b", b"a/b", b"folder", b"x" * 300])
def test_path_when_it_is_none_of_a_file_then_refused(tmp_path: Path, path: bytes) -> None:
    files = {b"a": 4, b"folder/c": 4}
    set_files(tmp_path, files)
    with raises(InvalidRequestError, argument="path"):
        write_blocks(tmp_path, [Block(path, 0, 1, content=b"x")])
    if path != b"b":
        with raises(InvalidRequestError, argument="path"):
            set_files(tmp_path, {**files, path: 1})
        assert list_files(tmp_path) == files
    if path in (b"a/b", b"folder"):
        with raises(InvalidRequestError, argument="path"):
            read_blocks(tmp_path, [Block(path, 0, 1)], max_bytes=1)


def test_block_when_too_large_or_beyond_the_end_then_refused(tmp_path: Path) -> None:
    set_files(tmp_path, {b"a": 4})
    with pytest.raises(InvalidRequestError):
        read_blocks(tmp_path, [Block(b"a", 0, MAX_BLOCK_BYTES + 1)], max_bytes=1)
    with pytest.raises(InvalidRequestError, match="ends before"):
        write_blocks(tmp_path, [Block(b"a", 2, 4, content=b"abcd")])
    assert (tmp_path / "a").read_bytes() == bytes(4)
