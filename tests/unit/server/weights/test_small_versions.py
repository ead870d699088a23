from __future__ import annotations

from tdserve.server.weights.small_versions import MAX_ANSWER_NBYTES, MAX_KEPT_NBYTES, Key, SmallVersions
from tdserve.v1 import control_pb2


def answer(content: bytes, values: bytes = b"") -> control_pb2.Done:
    """Returns an answer with its content in it."""
    return control_pb2.Done(inline=content, accepted=control_pb2.Accepted(values=values))


def key(version: int, *, uid: str = "a", dtype: int = 0) -> Key:
    """Returns the key of a version."""
    return uid, version, dtype


def test_small_versions_when_kept_then_found_by_store_version_and_dtype() -> None:
    small = SmallVersions()
    small.keep(key(1), answer(b"one", b"its values"))
    small.keep(key(1, dtype=3), answer(b"converted"))
    assert small.find(key(1)) == (b"one", b"its values")
    assert small.find(key(1, dtype=3)) == (b"converted", b"")
    assert small.find(key(2)) is None
    assert small.find(key(1, uid="b")) is None


def test_small_versions_when_an_answer_is_large_then_not_kept() -> None:
    small = SmallVersions()
    small.keep(key(1), answer(bytes(MAX_ANSWER_NBYTES - 1), b"12"))
    small.keep(key(2), answer(bytes(MAX_ANSWER_NBYTES - 2), b"12"))
    assert small.find(key(1)) is None
    assert small.find(key(2)) is not None


def test_small_versions_when_there_are_too_many_then_those_used_longest_ago_are_dropped() -> None:
    small = SmallVersions()
    num_kept = MAX_KEPT_NBYTES // MAX_ANSWER_NBYTES
    for version in range(num_kept):
        small.keep(key(version), answer(bytes(MAX_ANSWER_NBYTES)))
        small.keep(key(version), answer(bytes(MAX_ANSWER_NBYTES)))  # counted once
    assert small.find(key(0)) is not None
    small.keep(key(num_kept), answer(b"x"))
    assert small.find(key(1)) is None
    assert all(small.find(key(version)) is not None for version in (0, *range(2, num_kept + 1)))
