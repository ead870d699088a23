"""Files of versions that nobody needs any more."""

from __future__ import annotations

from pathlib import Path

from tdserve.rules.catalog import StoreRecord
from tdserve.rules.weights import Versions
from tdserve.server.opened_store import OpenedStore
from tdserve.server.weights.version_files import make_path, release_version
from tdserve.structure.tree import Node, Spec


def _publish(store: OpenedStore) -> int:
    versions = store.get_versions()
    begun = versions.begin(fingerprint=b"f")
    number = versions.next_number
    make_path(store, number).write_bytes(b"content")
    versions.commit(begun, 0.0, nbytes=7, metadata=b"")
    return number


def test_version_when_it_is_let_go_then_its_file_goes_only_if_it_is_kept_no_more(tmp_path: Path) -> None:
    (tmp_path / "versions").mkdir()
    store = OpenedStore(
        StoreRecord("w", "weights", "0" * 32), Spec(Node((), None, None, None, ())), tmp_path, versions=Versions(keep=1)
    )
    first = _publish(store)
    for _ in range(2):
        store.get_versions().acquire(first)
    release_version(store, first)
    assert make_path(store, first).exists()
    _publish(store)
    assert make_path(store, first).exists(), "somebody still needs it"
    release_version(store, first)
    assert not make_path(store, first).exists()
