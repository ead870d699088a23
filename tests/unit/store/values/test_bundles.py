"""Values of several paths that are kept together: each path always reads as if it were alone."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import lmdb
import numpy as np
import pytest

from tdserve.base.errors import CapacityError, CorruptDataError
from tdserve.store.database import environments
from tdserve.store.disk.sealed import seal
from tdserve.store.values.object_rows import KeyPath, make_name, make_tails
from tdserve.store.values.objects import ObjectColumn, Objects
from tdserve.values.value_bundles import encode_bundles
from tdserve.values.value_columns import JoinedValues

PATHS: list[KeyPath] = [("a",), ("b", "c"), ("d",)]
ROWS = list(range(6))

WRITER = """
import sys
from tdserve.store.values.objects import Objects
from tdserve.values.value_bundles import encode_bundles
paths, objects = [("a",), ("b", "c"), ("d",)], Objects(sys.argv[1], writable=True)
rows = list(range(6))
for number in range(10**9):
    text = b"%d" % number
    objects.put_bundles(paths, rows, encode_bundles([[text * 5000] * 6, [text] * 6, [text * 100] * 6]))
    if number == 3:
        print("going", flush=True)
"""


def put_whole(objects: Objects, rows: Sequence[int], tag: str, paths: Sequence[KeyPath] = PATHS) -> None:
    """New rows, with a value under each path."""
    objects.put_bundles(paths, rows, encode_bundles([[value(path, row, tag) for row in rows] for path in paths]))


def value(path: KeyPath, row: int, tag: str) -> bytes:
    """Different for each."""
    return f"{path} {row} {tag}".encode()


def read(objects: Objects, paths: Sequence[KeyPath], rows: Sequence[int] = ROWS) -> dict[tuple[KeyPath, int], bytes]:
    """What rows have."""
    found = objects.get_many([(path, rows) for path in paths])
    return {
        (path, row): each
        for path, (per_row, values) in zip(paths, found, strict=True)
        for row, each in zip(rows, values if per_row else list(values) * len(rows), strict=True)
        if each is not None
    }


def num_entries(folder: Path) -> int:
    """Records in the table of values, as any reader of the environment counts them."""
    shared = environments.acquire(folder, writable=False, max_bytes=0)
    with shared.env.begin() as txn:
        found = int(txn.stat(shared.env.open_db(b"values", txn, create=False))["entries"])
    environments.release(shared)
    return found


def test_bundles_when_stored_then_every_path_has_its_values(tmp_path: Path) -> None:
    with Objects(tmp_path, writable=True) as objects:
        put_whole(objects, [4, 1], "x")
        assert read(objects, PATHS) == {(path, row): value(path, row, "x") for path in PATHS for row in (1, 4)}
        assert num_entries(tmp_path) == 2
        rows = [1, 4]
        found = objects.get_many([(path, rows) for path in PATHS], joined={PATHS[2]: 3})
        assert [list(column.values) for column in found] == [[value(path, row, "x") for row in rows] for path in PATHS]
        first, second, third = (column.values for column in found)
        assert isinstance(first, JoinedValues)
        assert isinstance(second, JoinedValues)
        assert isinstance(third, JoinedValues)
        assert first.content is second.content
        assert len(third.heads) == 2 * 3
    with Objects(tmp_path) as reader:
        assert len(read(reader, PATHS)) == 6


def test_value_when_written_by_itself_then_comes_before_that_of_the_bundle_until_the_row_is_new(tmp_path: Path) -> None:
    path = PATHS[1]
    with Objects(tmp_path, writable=True) as objects:
        put_whole(objects, ROWS, "x")
        objects.put_many([ObjectColumn(path, [2, 3], [b"own"])])
        assert read(objects, [path], [1, 2, 3]) == {
            (path, 1): value(path, 1, "x"),
            (path, 2): b"own",
            (path, 3): b"own",
        }
        put_whole(objects, [2], "y")
        assert read(objects, PATHS, [2]) == {(each, 2): value(each, 2, "y") for each in PATHS}
        assert read(objects, [path], [3]) == {(path, 3): b"own"}
        put_whole(objects, ROWS, "z")
        assert num_entries(tmp_path) == len(ROWS)


def test_rows_when_all_paths_are_written_by_themselves_then_nothing_is_left_of_their_bundles(tmp_path: Path) -> None:
    with Objects(tmp_path, writable=True) as objects:
        put_whole(objects, ROWS, "x")
        rows = np.array([0, 1])
        objects.put_many([ObjectColumn(path, rows, [b"none"]) for path in PATHS])
        assert set(read(objects, PATHS, [0, 1]).values()) == {b"none"}
        assert num_entries(tmp_path) == len(ROWS) - 2 + 2 * len(PATHS)


def test_rows_when_older_values_lie_under_the_paths_themselves_then_are_replaced(tmp_path: Path) -> None:
    with Objects(tmp_path, writable=True) as objects:
        rows = np.array(ROWS)
        objects.put_many([ObjectColumn(path, rows, [value(path, row, "old") for row in ROWS]) for path in PATHS])
        put_whole(objects, [0, 5], "new")
        tags = ["new", "old", "old", "old", "old", "new"]
        assert read(objects, PATHS) == {(path, row): value(path, row, tags[row]) for path in PATHS for row in ROWS}
        put_whole(objects, ROWS, "newer")
        assert num_entries(tmp_path) == len(ROWS)


def test_bundle_when_paths_of_another_come_into_it_then_no_value_is_lost(tmp_path: Path) -> None:
    with Objects(tmp_path, writable=True) as objects:
        put_whole(objects, ROWS, "x", PATHS[:2])
        put_whole(objects, [1], "y", PATHS[1:])
        expected = {(path, row): value(path, row, "x") for path in PATHS[:2] for row in ROWS}
        expected |= {(path, 1): value(path, 1, "y") for path in PATHS[1:]}
        assert read(objects, PATHS) == expected


def test_paths_when_moved_and_cleared_then_the_others_of_the_bundle_stay(tmp_path: Path) -> None:
    with Objects(tmp_path, writable=True) as objects:
        put_whole(objects, ROWS, "x")
        objects.move([(PATHS[0], ("new",))], cleared=[PATHS[0]])
        expected = {(path, row): value(path, row, "x") for path in PATHS[1:] for row in ROWS}
        expected |= {(("new",), row): value(PATHS[0], row, "x") for row in ROWS}
        assert read(objects, [*PATHS, ("new",)]) == expected
        put_whole(objects, ROWS, "y", PATHS[1:])
        objects.move([], cleared=[PATHS[1]], cleared_below="d")
        assert read(objects, PATHS) == {}
        assert num_entries(tmp_path) == len(ROWS)
        objects.put_many([ObjectColumn(("new",), None, [b"all"])], clear=[("new",)])
        assert num_entries(tmp_path) == 1


def test_whatever_is_done_when_compared_with_a_plain_dict_then_reads_the_same(tmp_path: Path) -> None:
    chance = random.Random(1)
    model: dict[tuple[KeyPath, int], bytes] = {}
    with Objects(tmp_path, writable=True) as objects:
        for step in range(300):
            rows = chance.sample(ROWS, chance.randint(1, 3))
            paths = [path for path in PATHS if chance.random() < 0.6] or PATHS
            doing = chance.choice(["whole", "whole", "columns", "rename", "clear"])
            tag = str(step)
            if doing == "whole":
                members = PATHS if chance.random() < 0.8 else paths
                put_whole(objects, rows, tag, members)
                model |= {(path, row): value(path, row, tag) for path in members for row in rows}
            elif doing == "columns":
                same = np.array(rows)
                objects.put_many([ObjectColumn(p, same, [value(p, row, tag) for row in rows]) for p in paths])
                model |= {(path, row): value(path, row, tag) for path in paths for row in rows}
            elif doing == "rename" and chance.random() < 0.3:
                source, target = chance.sample(PATHS, 2)
                objects.move([(source, target)], cleared=[source])
                moved = {(target, row): each for (path, row), each in model.items() if path == source}
                if moved:
                    model = {key: each for key, each in model.items() if key[0] not in (source, target)} | moved
            elif doing == "clear" and chance.random() < 0.3:
                objects.put_many(
                    [ObjectColumn(p, rows, [value(p, row, tag) for row in rows]) for p in paths], clear=paths
                )
                model = {key: each for key, each in model.items() if key[0] not in paths}
                model |= {(path, row): value(path, row, tag) for path in paths for row in rows}
            assert read(objects, PATHS) == model, (step, doing)


def test_bundles_when_the_environment_is_copied_then_go_along(tmp_path: Path) -> None:
    with Objects(tmp_path / "old", writable=True) as objects:
        put_whole(objects, ROWS, "x")
        objects.copy(tmp_path / "new")
        expected = read(objects, PATHS)
    with Objects(tmp_path / "new", writable=True) as copied:
        assert read(copied, PATHS) == expected
        put_whole(copied, [0], "y")
        assert read(copied, PATHS, [0]) == {(path, 0): value(path, 0, "y") for path in PATHS}


def test_bundles_when_there_is_no_room_then_the_old_ones_stay(tmp_path: Path) -> None:
    with Objects(tmp_path, writable=True, max_bytes=1 << 20) as objects:
        put_whole(objects, ROWS, "x")
        with pytest.raises(CapacityError, match="max_object_bytes") as raised:
            objects.put_bundles(PATHS, ROWS, encode_bundles([[bytes(200_000)] * 6] * 3))
        assert int(str(raised.value.fields["asked"])) > 3_600_000
        assert read(objects, PATHS) == {(path, row): value(path, row, "x") for path in PATHS for row in ROWS}
        for number in range(40):
            objects.put_bundles(PATHS, ROWS, encode_bundles([[bytes([number]) * 5_000] * 6] * 3))


def test_bundle_when_damaged_then_corrupt_data(tmp_path: Path) -> None:
    with Objects(tmp_path, writable=True) as objects:
        put_whole(objects, ROWS, "x")
    with lmdb.open(str(tmp_path), max_dbs=4) as env:
        values = env.open_db(b"values")
        with env.begin(write=True) as txn:
            for row, content in ((1, b"\0" * 13), (2, b"\1" * 13)):
                key = make_name(tuple(PATHS)) + make_tails([row])[0]
                txn.put(key, seal(key, content) if row == 1 else content, db=values)
    with Objects(tmp_path) as objects:
        assert len(read(objects, PATHS, [0])) == 3
        with pytest.raises(CorruptDataError, match="bytes that are not bundles"):
            objects.get_many([(PATHS[0], [0, 1])])
        with pytest.raises(CorruptDataError, match=r"checksum .* tdserve check"):
            objects.get_many([(PATHS[0], [0, 2])])


@pytest.mark.slow
def test_bundles_when_their_writer_is_killed_then_every_row_is_of_one_write(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        try:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "going\n"
            with Objects(tmp_path) as reader:
                for _ in range(50):
                    check_one_write(reader)
        finally:
            writer.send_signal(signal.SIGKILL)
    with Objects(tmp_path, writable=True) as objects:
        check_one_write(objects)
        put_whole(objects, ROWS, "x")
        assert read(objects, PATHS) == {(path, row): value(path, row, "x") for path in PATHS for row in ROWS}


def check_one_write(objects: Objects) -> None:
    """Checks that all values come from the same transaction."""
    long, short, middle = (list(column.values) for column in objects.get_many([(path, ROWS) for path in PATHS]))
    (text,) = set(short)
    assert text is not None
    assert set(long) == {text * 5000}
    assert set(middle) == {text * 100}
