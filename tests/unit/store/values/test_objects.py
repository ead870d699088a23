"""Non-tensor values by (row, key)."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import lmdb
import numpy as np
import pytest

from tdserve.base.errors import CapacityError, ClosedError, CorruptDataError, LocalProtocolError, WrongStateError
from tdserve.store.disk.sealed import seal
from tdserve.store.values.object_rows import KeyPath
from tdserve.store.values.objects import COMMITS_PER_CHECK, ObjectColumn, Objects
from tdserve.values.value_bundles import encode_bundles
from tdserve.values.value_columns import JoinedValues

READ = """
import sys
from tdserve.store.values.objects import Objects
with Objects(sys.argv[1]) as objects:
    print(list(objects.get_many([(("k",), [0, 1])])[0].values))
"""


def put(objects: Objects, *items: tuple[int | None, KeyPath, bytes], clear: Iterable[KeyPath] = ()) -> None:
    """Writes single values: (row, path, value), in one commit."""
    objects.put_many(
        [ObjectColumn(path, None if row is None else [row], [value]) for row, path, value in items], clear=clear
    )


def get(objects: Objects, rows: list[int], *paths: KeyPath) -> list[list[bytes | None]]:
    """What rows of each path read, whether it is their own or common."""
    found = objects.get_many([(path, rows) for path in paths])
    return [list(values) if per_row else list(values) * len(rows) for per_row, values in found]


def test_values_when_a_row_has_its_own_then_it_hides_the_common_one(tmp_path: Path) -> None:
    with Objects(tmp_path, writable=True) as objects:
        put(objects, (None, ("a",), b"all"), (3, ("a",), b"three"), (0, ("a", "b"), b"nested"))
        found = objects.get_many([(("a",), [3, 1, 3]), (("a", "b"), [0, 3]), (("none",), [1]), (("a",), [])])
        assert found == [(True, [b"three", b"all", b"three"]), (True, [b"nested", None]), (False, [None]), (True, [])]


def test_values_when_one_is_given_for_several_rows_then_all_have_it(tmp_path: Path) -> None:
    with Objects(tmp_path, writable=True) as objects:
        objects.put_many([ObjectColumn(("a",), np.array([5, 2]), [b"x"]), ObjectColumn(("b",), [0, 1], [b"0", b"1"])])
        assert get(objects, [2, 5, 0], ("a",)) == [[b"x", b"x", None]]
        assert get(objects, [1, 0], ("b",)) == [[b"1", b"0"]]


def test_values_when_several_paths_are_given_the_same_rows_then_each_row_has_those_of_its_own(tmp_path: Path) -> None:
    same = np.array([7, 2])
    columns = [(("a",), same, [b"a7", b"a2"]), (("b",), np.array([2, 7]), [b"b2", b"b7"]), (("c",), same, [b"c"])]
    with Objects(tmp_path, writable=True) as objects:
        objects.put_many([ObjectColumn(*column) for column in columns])
        assert get(objects, [2, 7, 3], ("a",), ("b",), ("c",)) == [
            [b"a2", b"a7", None],
            [b"b2", b"b7", None],
            [b"c", b"c", None],
        ]


@pytest.mark.parametrize("head_nbytes", [0, 2])
def test_values_when_read_joined_then_the_same_in_one_buffer(tmp_path: Path, head_nbytes: int) -> None:
    path = ("a",)
    with Objects(tmp_path, writable=True) as objects:
        put(objects, *((row, path, b"%d" % row * 3000) for row in (0, 3)), (0, ("b",), b"b"))
        wanted = [(path, [3, 0, 3]), (("b",), [0]), (("none",), [0]), (path, [1])]
        found = objects.get_many(wanted, joined={path: head_nbytes})
        expected = [b"3" * 3000, b"0" * 3000, b"3" * 3000]
        assert isinstance(found[0].values, JoinedValues)
        assert found == [(True, expected), (True, [b"b"]), (False, [None]), (True, [None])]
        put(objects, (None, path, b"all"))
        ((_, (own, common)),) = objects.get_many([(path, [3, 1])], joined={path: head_nbytes})
        assert (own, common) == (expected[0], b"all")


def test_rows_when_given_what_is_common_then_get_no_value_of_their_own_unless_cleared(tmp_path: Path) -> None:
    path = ("a",)
    with Objects(tmp_path, writable=True) as objects:
        put(objects, (None, path, b"all"))
        put(objects, (1, path, b"all"))
        assert objects.get_many([(path, [1])]) == [(False, [b"all"])]
        put(objects, (0, path, b"all"), clear=[path])
        assert objects.get_many([(path, [0])]) == [(True, [b"all"])]
        put(objects, (1, path, b"own"))
        put(objects, (1, path, b"all"))
        assert objects.get_many([(path, [1])]) == [(True, [b"all"])]


def test_paths_when_cleared_then_only_they_lose_their_rows(tmp_path: Path) -> None:
    with Objects(tmp_path, writable=True) as objects:
        for row in (0, 5, 2**40):
            put(objects, (row, ("a",), b"own"), (row, ("b",), b"own"))
        put(objects, (None, ("a",), b"all"), clear=[("a",)])
        assert get(objects, [0, 5, 2**40], ("a",), ("b",)) == [[b"all"] * 3, [b"own"] * 3]
        put(objects, (None, ("b",), b"new"), clear=[("b",)])
        assert get(objects, [0, 7], ("b",)) == [[b"new"] * 2]


def test_paths_when_keys_hold_any_text_then_do_not_mix(tmp_path: Path) -> None:
    paths = [("a.b",), ("a", "b"), ("",), ("", ""), ("é" * 1000,), ('a", "b',), ("\ud800",)]
    with Objects(tmp_path, writable=True) as objects:
        put(objects, *((0, path, b"%d" % number) for number, path in enumerate(paths)))
        assert get(objects, [0], *paths) == [[b"%d" % number] for number in range(len(paths))]


@pytest.mark.slow
def test_values_when_committed_then_another_process_reads_them_at_once(tmp_path: Path) -> None:
    with Objects(tmp_path, writable=True) as objects:
        put(objects, (None, ("k",), b"x"), (1, ("k",), b"y"))
        done = subprocess.run([sys.executable, "-c", READ, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[b'x', b'y']"


def test_environment_when_opened_by_another_tool_then_names_its_paths(tmp_path: Path) -> None:
    with Objects(tmp_path, writable=True) as objects:
        put(objects, (4, ("a", "b"), b"v"))
    with lmdb.open(str(tmp_path), max_dbs=2) as env, env.begin() as txn:
        [(digest, path)] = list(txn.cursor(db=env.open_db(b"paths", txn=txn)))
        assert json.loads(path) == ["a", "b"]
        key = digest + (5).to_bytes(8, "big")
        assert txn.get(key, db=env.open_db(b"values", txn=txn)) == seal(key, b"v")


def test_objects_when_folder_was_never_made_then_do_not_exist(tmp_path: Path) -> None:
    assert not Objects.exists(tmp_path)
    with pytest.raises(CorruptDataError):
        Objects(tmp_path / "none")
    Objects(tmp_path, writable=True).close()
    assert Objects.exists(tmp_path)
    with Objects(tmp_path) as reader:
        assert get(reader, [0], ("a",)) == [[None]]
        with pytest.raises(WrongStateError):
            Objects(tmp_path, writable=True)


def test_objects_when_the_map_is_full_then_nothing_of_the_batch_is_stored(tmp_path: Path) -> None:
    folder = tmp_path / "my store" / "objects"
    folder.parent.mkdir()
    with Objects(folder, writable=True, max_bytes=1 << 20) as objects:
        free_bytes = objects.free_bytes()
        with pytest.raises(CapacityError, match=r"'my store'.*max_object_bytes=1048576; overwriting takes") as caught:
            put(objects, (0, ("small",), b"1"), (0, ("big",), bytes(2 << 20)))
        assert (caught.value.asked, caught.value.free) == ((2 << 20) + 1, free_bytes)
        assert get(objects, [0], ("small",)) == [[None]]
        put(objects, (0, ("small",), b"1"))
        assert get(objects, [0], ("small",)) == [[b"1"]]


def test_objects_when_full_of_values_that_are_replaced_then_go_on(tmp_path: Path) -> None:
    path = ("v",)
    with Objects(tmp_path, writable=True, max_bytes=1 << 20) as objects:
        for turn in range(20):  # 0.6 MB each, so that one turn fits beside the next
            for row in range(0, 100, 10):
                objects.put_many([ObjectColumn(path, range(row, row + 10), [b"%d" % turn * (6000 // len(str(turn)))])])
        assert get(objects, [99], path) == [[b"19" * 3000]]
        objects.put_many([ObjectColumn(path, None, [b"all"])], clear=[path])
        assert objects.free_bytes() > 900_000
        objects.put_many([ObjectColumn(path, range(100), [bytes(6000)])])


def test_copy_when_values_were_replaced_then_is_small_and_has_the_same(tmp_path: Path) -> None:
    path = ("v",)
    with Objects(tmp_path / "old", writable=True, max_bytes=1 << 26) as objects:
        objects.put_many([ObjectColumn(path, range(100), [bytes(20_000)])])
        objects.put_many([ObjectColumn(path, range(100), [b"small"])])
        objects.copy(tmp_path / "new")
        sizes = [(tmp_path / folder / "data.mdb").stat().st_size for folder in ("new", "old")]
        assert sizes[0] < 50_000 < 2_000_000 < sizes[1]
        with Objects(tmp_path / "new", writable=True, max_bytes=1 << 26) as copied:
            assert copied.get_many([(path, [0, 99, 100])]) == [(True, [b"small", b"small", None])]
            put(copied, (0, path, b"new"))
        assert get(objects, [0], path) == [[b"small"]]
        with pytest.raises(CorruptDataError):
            objects.copy(tmp_path / "new")
    with Objects(tmp_path / "new") as reader:
        assert reader.free_bytes() > (1 << 26) - 200_000


def test_objects_when_not_closed_then_the_last_reference_closes_them(tmp_path: Path) -> None:
    objects = Objects(tmp_path, writable=True)
    with pytest.raises(lmdb.Error):  # LMDB refuses what is open in this process
        lmdb.open(str(tmp_path))
    del objects
    lmdb.open(str(tmp_path)).close()


READ_AND_DIE = """
import os, signal, sys, lmdb
env = lmdb.open(sys.argv[1], readonly=True, max_dbs=16, map_size=1 << 20)
txn = env.begin()
print("reading", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def reader_inside_a_read(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that has begun to read."""
    command = [sys.executable, "-c", READ_AND_DIE, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == b"reading\n"
        yield reader
        reader.kill()


def fill(objects: Objects, num_turns: int) -> None:
    """Writes the same 0.4 MB anew."""
    for _ in range(num_turns):
        objects.put_many([ObjectColumn(("v",), range(50), [bytes(6000)])])


def test_objects_when_a_reader_was_killed_inside_a_read_then_its_pages_are_used_again(tmp_path: Path) -> None:
    with Objects(tmp_path, writable=True, max_bytes=1 << 20) as objects:
        fill(objects, 1)
        with reader_inside_a_read(tmp_path) as reader:
            with pytest.raises(CapacityError):
                fill(objects, 5)
            reader.kill()
            reader.wait()
            fill(objects, 5)


@pytest.mark.slow
def test_objects_when_a_reader_was_killed_inside_a_read_then_the_file_stops_growing(tmp_path: Path) -> None:
    with Objects(tmp_path, writable=True) as objects:
        fill(objects, 1)
        with reader_inside_a_read(tmp_path) as reader:
            fill(objects, 10)
            reader.kill()
            reader.wait()
        fill(objects, COMMITS_PER_CHECK)
        nbytes = (tmp_path / "data.mdb").stat().st_size
        fill(objects, COMMITS_PER_CHECK)
        assert (tmp_path / "data.mdb").stat().st_size == nbytes


def test_objects_when_misused_then_are_refused(tmp_path: Path) -> None:
    objects = Objects(tmp_path, writable=True)
    with pytest.raises(LocalProtocolError):
        put(objects, (-2, ("a",), b""))
    objects.sync()
    objects.close()
    with pytest.raises(ClosedError):
        objects.get_many([(("a",), [0])])


def test_move_when_paths_change_then_values_of_rows_and_of_all_are_under_the_new_ones(tmp_path: Path) -> None:
    a, b, c = ("a",), ("b",), ("n", "c")
    with Objects(tmp_path / "o", writable=True) as objects:
        put(objects, (None, a, b"all"), (1, a, b"one"), (None, b, b"old"), (0, b, b"old row"), (2, c, b"kept"))
        for _ in range(2):  # to do it again changes nothing
            objects.move([(a, b)], cleared=[a])
            assert get(objects, [0, 1], b) == [[b"all", b"one"]]
            assert get(objects, [0, 1], a) == [[None, None]]
            assert get(objects, [2], c) == [[b"kept"]]
        put(objects, (None, a, b"new"))
        assert get(objects, [0, 1], a) == [[b"new", b"new"]]
    with Objects(tmp_path / "o") as objects:
        assert get(objects, [0, 1], a, b) == [[b"new", b"new"], [b"all", b"one"]]


def test_move_when_there_is_no_room_then_nothing_is_changed(tmp_path: Path) -> None:
    with Objects(tmp_path / "o", writable=True, max_bytes=1 << 20) as objects:
        put(objects, *((row, ("a",), bytes(50_000)) for row in range(10)))
        with pytest.raises(CapacityError):
            objects.move([(("a",), ("b",)), (("a",), ("c",))], cleared=[("a",)])
        assert get(objects, [9], ("a",), ("b",)) == [[bytes(50_000)], [None]]


def test_move_when_paths_are_cleared_below_a_key_then_all_that_begin_with_it(tmp_path: Path) -> None:
    with Objects(tmp_path / "o", writable=True) as objects:
        put(objects, (None, ("w", "a"), b"1"), (2, ("w", "n", "b"), b"2"), (None, ("a",), b"3"), (None, ("wx",), b"4"))
        objects.move([], cleared_below="w")
        assert get(objects, [2], ("w", "a"), ("w", "n", "b"), ("a",), ("wx",)) == [[None], [None], [b"3"], [b"4"]]


def test_drop_when_rows_have_values_of_their_own_or_in_bundles_then_theirs_alone_go(tmp_path: Path) -> None:
    a, b, c = ("a",), ("b",), ("c",)
    with Objects(tmp_path / "o", writable=True) as objects:
        put(objects, (None, a, b"all"), (1, a, b"one"), (2, a, b"two"))
        objects.put_bundles([b, c], [0, 1, 2], encode_bundles([[b"b0", b"b1", b"b2"], [b"c0", b"c1", b"c2"]]))
        assert objects.drop([(path, [1, 2]) for path in (a, b, c)]) == 4
        assert get(objects, [0, 1, 2], a, b, c) == [
            [b"all", b"all", b"all"],
            [b"b0", None, None],
            [b"c0", None, None],
        ]
        assert objects.drop([(path, [1, 2, 7]) for path in (a, b, c)]) == 0


def test_drop_when_the_map_is_full_then_there_is_room_again(tmp_path: Path) -> None:
    with Objects(tmp_path / "o", writable=True, max_bytes=1 << 20) as objects:
        put(objects, *((row, ("a",), bytes(100_000)) for row in range(8)))
        with pytest.raises(CapacityError):
            put(objects, *((row, ("a",), bytes(100_000)) for row in range(8, 16)))
        assert objects.drop([(("a",), range(100))]) > 5
        put(objects, *((row, ("a",), bytes(100_000)) for row in range(100, 105)))
        assert get(objects, [0, 104], ("a",)) == [[None, bytes(100_000)]]
