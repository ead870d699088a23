"""Non-tensor values by (row, key)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import lmdb
import pytest

from tdserve.errors import CapacityError, ClosedError, CorruptDataError, LocalProtocolError, WrongStateError
from tdserve.store.objects import ALL_ROWS, Objects

READ = """
import sys
from tdserve.store.objects import Objects
with Objects(sys.argv[1]) as objects:
    print(objects.get_many([0, 1], [("k",)]))
"""


def test_values_when_a_row_has_its_own_then_it_hides_the_common_one(tmp_path: Path) -> None:
    with Objects(tmp_path, writable=True) as objects:
        objects.put_many([(ALL_ROWS, ("a",), b"all"), (3, ("a",), b"three"), (0, ("a", "b"), b"nested")])
        found = objects.get_many([3, 1, ALL_ROWS, 3], [("a",), ("a", "b"), ("none",)])
        assert found == [[b"three", b"all", b"all", b"three"], [None] * 4, [None] * 4]
        assert objects.get_many([0], [("a", "b")]) == [[b"nested"]]
        assert objects.has_rows(("a",))
        assert not objects.has_rows(("none",))


def test_clear_rows_when_called_then_only_that_path_loses_its_rows(tmp_path: Path) -> None:
    with Objects(tmp_path, writable=True) as objects:
        objects.put_many([(row, (key,), b"own") for row in (0, 5, 2**40) for key in "ab"])
        objects.put_many([(ALL_ROWS, ("a",), b"all")])
        objects.clear_rows(("a",))
        assert objects.get_many([0, 5, 2**40], [("a",), ("b",)]) == [[b"all"] * 3, [b"own"] * 3]
        objects.put_many([(ALL_ROWS, ("b",), b"new")], clear=[("b",)])
        assert objects.get_many([0, 7], [("b",)]) == [[b"new"] * 2]


def test_paths_when_keys_hold_any_text_then_do_not_mix(tmp_path: Path) -> None:
    paths = [("a.b",), ("a", "b"), ("",), ("", ""), ("é" * 1000,), ('a", "b',), ("\ud800",)]
    with Objects(tmp_path, writable=True) as objects:
        objects.put_many([(0, path, b"%d" % number) for number, path in enumerate(paths)])
        assert objects.get_many([0], paths) == [[b"%d" % number] for number in range(len(paths))]


def test_values_when_committed_then_another_process_reads_them_at_once(tmp_path: Path) -> None:
    with Objects(tmp_path, writable=True) as objects:
        objects.put_many([(ALL_ROWS, ("k",), b"x"), (1, ("k",), b"y")])
        done = subprocess.run([sys.executable, "-c", READ, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[[b'x', b'y']]"


def test_environment_when_opened_by_another_tool_then_names_its_paths(tmp_path: Path) -> None:
    with Objects(tmp_path, writable=True) as objects:
        objects.put_many([(4, ("a", "b"), b"v")])
    with lmdb.open(str(tmp_path), max_dbs=2) as env, env.begin() as txn:
        [(digest, path)] = list(txn.cursor(db=env.open_db(b"paths", txn=txn)))
        assert json.loads(path) == ["a", "b"]
        assert txn.get(digest + (5).to_bytes(8, "big"), db=env.open_db(b"values", txn=txn)) == b"v"


def test_objects_when_folder_was_never_made_then_do_not_exist(tmp_path: Path) -> None:
    assert not Objects.exists(tmp_path)
    with pytest.raises(CorruptDataError):
        Objects(tmp_path / "none")
    Objects(tmp_path, writable=True).close()
    assert Objects.exists(tmp_path)
    with Objects(tmp_path) as reader:
        assert reader.get_many([0], [("a",)]) == [[None]]
        with pytest.raises(WrongStateError):
            Objects(tmp_path, writable=True)


def test_objects_when_the_map_is_full_then_nothing_of_the_batch_is_stored(tmp_path: Path) -> None:
    with Objects(tmp_path, writable=True, max_bytes=1 << 20) as objects:
        with pytest.raises(CapacityError):
            objects.put_many([(0, ("small",), b"1"), (0, ("big",), bytes(2 << 20))])
        assert objects.get_many([0], [("small",)]) == [[None]]
        objects.put_many([(0, ("small",), b"1")])


def test_objects_when_misused_then_are_refused(tmp_path: Path) -> None:
    objects = Objects(tmp_path, writable=True)
    with pytest.raises(LocalProtocolError):
        objects.put_many([(-2, ("a",), b"")])
    objects.sync()
    objects.close()
    with pytest.raises(ClosedError):
        objects.get_many([0], [("a",)])
