from __future__ import annotations

import pytest

from tdserve.server.open_store import worker_spec_cache
from tdserve.server.open_store.worker_spec_cache import WorkerSpecCache
from tdserve.structure.trees.tree import Node, Spec, TensorLeaf


def spec_of(*keys: str) -> Spec:
    """A structure with these keys."""
    return Spec(Node((4,), None, None, None, tuple((key, TensorLeaf("int64", (4,))) for key in keys)))


def test_must_include_when_asked_again_then_only_the_first_time_until_the_worker_is_another() -> None:
    cache = WorkerSpecCache(lambda: None)
    assert [cache.must_include(spec_of(key)) for key in "aab"] == [True, False, True]
    cache.clear()
    assert cache.must_include(spec_of("a"))


def test_must_include_when_there_were_too_many_leaves_then_the_worker_forgets_and_specs_are_sent_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_spec_cache, "MAX_LEAVES", 2570)  # ten of these structures
    forgotten: list[int] = []
    cache = WorkerSpecCache(lambda: forgotten.append(len(cache)))
    assert all(cache.must_include(spec_of(f"k{number}")) for number in range(20))
    assert forgotten == [0]
    assert len(cache) == 10
    assert cache.must_include(spec_of("k0"))
    assert forgotten == [0, 0]
    assert cache.must_include(spec_of(*map(str, range(2600))))  # more than there is room for
    assert not cache.must_include(spec_of(*map(str, range(2600))))
    assert len(cache) == 1
