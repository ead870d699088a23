from __future__ import annotations

import weakref
from threading import Event

import pytest
import torch

from tdserve.transport.ending_groups import EndingGroups

TIMEOUT_S = 20.0


def test_bury_when_the_end_takes_long_then_memory_is_kept_until_then_and_given_back() -> None:
    groups, may_end, is_given_back = EndingGroups(), Event(), Event()
    memory = torch.zeros(3)
    is_kept = weakref.ref(memory)

    def end() -> None:
        assert may_end.wait(TIMEOUT_S)

    thread = groups.end_in_thread(end, keeps=memory, name="tdserve-end", on_ended=is_given_back.set)
    del memory
    assert thread.name == "tdserve-end"
    assert not groups.join(0.0)
    assert groups.num_ending == 1
    assert is_kept() is not None
    assert not is_given_back.is_set()
    may_end.set()
    assert groups.join(TIMEOUT_S)
    assert groups.num_ending == 0
    assert is_kept() is None
    assert is_given_back.is_set()


def test_bury_when_the_end_fails_then_memory_is_not_given_back(caplog: pytest.LogCaptureFixture) -> None:
    groups, is_given_back = EndingGroups(), Event()
    memory = torch.zeros(3)
    is_kept = weakref.ref(memory)

    def end() -> None:
        raise RuntimeError("an illegal memory access")

    groups.end_in_thread(end, keeps=memory, name="tdserve-end", on_ended=is_given_back.set)
    del memory
    assert groups.join(TIMEOUT_S)
    assert groups.num_ending == 0
    assert not is_given_back.is_set()
    assert is_kept() is not None
    assert "tdserve-end" in caplog.text
