"""Files of versions that nobody needs any more."""

from __future__ import annotations

from pathlib import Path

import pytest

from tdserve.rules.catalog import StoreRecord
from tdserve.rules.weights import Versions
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.weights.version_files import abandon, drop, make_path, make_unfinished_path, release_version
from tdserve.structure.trees.tree import Node, Spec


def _publish(store: OpenedStore) -> int:
    versions = store.get_versions()
    begun = versions.begin(fingerprint=b"f")
    number = versions.next_number
    make_path(store, number).write_bytes(b"content")
    versions.commit(begun, 0.0, nbytes=7, metadata=b"")
    return number


def _make_store(folder: Path) -> OpenedStore:
    (folder / "versions").mkdir(exist_ok=True)
    record, spec = StoreRecord("w", "weights", "0" * 32), Spec(Node((), None, None, None, ()))
    return OpenedStore(record, spec, folder, versions=Versions(keep=1))


def test_version_when_it_is_let_go_then_its_file_goes_only_if_it_is_kept_no_more(tmp_path: Path) -> None:
    store = _make_store(tmp_path)
    first = _publish(store)
    for _ in range(2):
        store.get_versions().acquire(first)
    release_version(store, first)
    assert make_path(store, first).exists()
    _publish(store)
    assert make_path(store, first).exists(), "somebody still needs it"
    release_version(store, first)
    assert not make_path(store, first).exists()


@pytest.mark.parametrize("is_kept", [True, False])
def test_version_when_it_is_let_go_after_its_store_then_that_number_of_the_next_store_stays(
    tmp_path: Path, is_kept: bool
) -> None:
    store = _make_store(tmp_path)
    number = _publish(store)
    store.get_versions().acquire(number)
    if not is_kept:
        _publish(store)
    store.waiters.delete("w")
    following = _make_store(tmp_path)
    path = make_path(following, _publish(following))
    assert path == make_path(store, number)
    release_version(store, number)
    drop(store, (number,))
    assert path.exists()


def test_abandon_when_the_file_was_made_after_its_store_then_gone_all_the_same(tmp_path: Path) -> None:
    store = _make_store(tmp_path)
    begun = store.get_versions().begin(fingerprint=b"f")
    store.waiters.delete("w")
    path = make_unfinished_path(store, begun)
    path.write_bytes(b"content")
    abandon(store, begun)
    assert not path.exists()
