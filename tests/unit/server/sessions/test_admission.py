from __future__ import annotations

from itertools import count
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tdserve.base.errors import ServerBusyError
from tdserve.base.machine import count_descriptors, get_descriptor_limit
from tdserve.server.sessions import admission
from tdserve.server.sessions.admission import check_room, count_kept_descriptors

WORKER = cast(Any, SimpleNamespace(number=3, pid=None))
"""A worker whose descriptors are those of this process."""


def sessions(num: int, *, worker: Any = WORKER) -> Any:
    """Returns sessions whose channels are not open yet."""
    return [SimpleNamespace(worker=worker, num_promised_descriptors=2) for _ in range(num)]


def set_limit(monkeypatch: pytest.MonkeyPatch, num_free: int) -> int:
    """Sets a limit that leaves so many descriptors, however many tests before have left open in this process."""
    num_used = count_descriptors()
    limit = next(each for each in count(num_used) if each - count_kept_descriptors(each) == num_used + num_free)
    monkeypatch.setattr(admission, "get_descriptor_limit", lambda: limit)
    return limit


@pytest.mark.parametrize(("limit", "kept"), [(128, 32), (256, 32), (1024, 128), (20_000, 2_500)])
def test_kept_when_the_limit_is_this_then_so_many_are_for_files(limit: int, kept: int) -> None:
    assert count_kept_descriptors(limit) == kept


def test_check_room_when_there_is_room_then_nothing() -> None:
    assert get_descriptor_limit() > 500
    check_room(WORKER, sessions(10), "gloo")


def test_check_room_when_the_last_fit_then_the_next_is_refused_with_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = set_limit(monkeypatch, 22)
    check_room(WORKER, sessions(9), "gloo")
    with pytest.raises(ServerBusyError) as caught:
        check_room(WORKER, sessions(11), "gloo")
    what = "another client, in descriptors of data worker 3"
    assert caught.value.fields == {"what": what, "asked": 2, "free": 0, "limit": limit}
    with pytest.raises(ServerBusyError):
        check_room(WORKER, sessions(9), "nccl")


def test_check_room_when_others_have_another_worker_then_they_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    set_limit(monkeypatch, 22)
    check_room(WORKER, sessions(100, worker=object()), "gloo")


def test_check_room_when_control_has_none_left_then_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    set_limit(monkeypatch, 0)
    empty = cast(Any, SimpleNamespace(number=3, pid=2**22 - 1))
    with pytest.raises(ServerBusyError, match="the control process"):
        check_room(empty, [], "gloo")
