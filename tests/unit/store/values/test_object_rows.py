"""Keys of the table of values."""

from __future__ import annotations

from pathlib import Path

import lmdb
import numpy as np
import pytest

from tdserve.base.errors import LocalProtocolError
from tdserve.store.disk.sealed import seal
from tdserve.store.values.object_rows import COMMON, NAME_BYTES, clear, has_rows, make_name, make_tails, read_all


def test_names_when_of_different_paths_then_differ_and_stay() -> None:
    names = {make_name(("a",)), make_name(("a", "b")), make_name(("ab",)), make_name((("a",), ("b",))), make_name(())}
    assert len(names) == 5
    assert {len(name) for name in names} == {NAME_BYTES}
    assert make_name(("a", "b")).hex() == "3554d2b8a1e34099053865de8576d146"  # stored on disk: a change is a new format


def test_tails_when_of_rows_then_sort_as_they_do() -> None:
    tails = make_tails(np.array([0, 255, 256, 2**40]))
    assert tails == sorted(tails)
    assert tails[0] == (1).to_bytes(8, "big") != COMMON
    assert make_tails([]) == []
    with pytest.raises(LocalProtocolError, match="row -1"):
        make_tails([0, -1])


def test_cursor_when_names_follow_one_another_then_each_has_its_own_values(tmp_path: Path) -> None:
    names = sorted([make_name(("a",)), make_name(("b",)), make_name(("c",))])
    with lmdb.open(str(tmp_path)) as env, env.begin(write=True) as txn:
        cursor = txn.cursor()
        for name, row in ((names[0], 1), (names[2], 1), (names[2], 2)):
            key = name + make_tails([row])[0]
            txn.put(key, seal(key, str(row).encode()))
        txn.put(names[1] + COMMON, seal(names[1] + COMMON, b"all"))
        assert [has_rows(cursor, name) for name in names] == [True, False, True]
        assert read_all(cursor, names[1], "") == [(COMMON, b"all")]
        clear(cursor, names[1])
        assert len(read_all(cursor, names[1], "")) == 1
        clear(cursor, names[1], with_common=True)
        clear(cursor, names[0])
        assert [len(read_all(cursor, name, "")) for name in names] == [0, 0, 2]
