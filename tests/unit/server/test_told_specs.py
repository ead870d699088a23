from __future__ import annotations

from tdserve.server.told_specs import MAX_TOLD, ToldSpecs


def test_must_tell_when_asked_again_then_only_the_first_time_until_the_worker_is_another() -> None:
    told = ToldSpecs(lambda: None)
    assert [told.must_tell(b"a"), told.must_tell(b"a"), told.must_tell(b"b")] == [True, False, True]
    told.clear()
    assert told.must_tell(b"a")


def test_must_tell_when_there_were_ever_more_then_the_worker_forgets_and_is_told_again() -> None:
    forgotten: list[int] = []
    told = ToldSpecs(lambda: forgotten.append(len(told)))
    assert all(told.must_tell(b"%d" % number) for number in range(2 * MAX_TOLD))
    assert forgotten == [0]
    assert len(told) == MAX_TOLD
    assert told.must_tell(b"0")
    assert forgotten == [0, 0]
