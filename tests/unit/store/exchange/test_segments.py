from __future__ import annotations

import gc
import os
import pickle
from dataclasses import replace

import numpy as np
import pytest

from tdserve.base.errors import CorruptDataError, PeerLostError
from tdserve.store.exchange.segments import (
    MAX_KEPT,
    MAX_KEPT_NBYTES,
    NUM_MARKS,
    MappedSegments,
    Segment,
    SegmentReference,
    receive,
)


def _sent(segment: Segment, nbytes: int) -> SegmentReference:
    sent = segment.send(nbytes)
    assert sent is not None
    return sent


def test_segment_when_received_then_the_same_memory_until_the_last_view_is_dropped() -> None:
    segment = Segment(10_000)
    segment.lend(100)[:] = 7
    assert not segment.is_with_others
    sent = _sent(segment, 100)
    assert segment.is_with_others  # although nobody has looked at it yet
    found = receive(sent)
    view = found[50:]
    assert found.tolist() == [7] * 100
    segment.lend(100)[99] = 8
    assert view[-1] == 8
    del found
    gc.collect()
    assert segment.is_with_others
    del view
    gc.collect()
    assert not segment.is_with_others


def test_segment_when_with_many_receivers_then_with_others_until_the_last_is_done() -> None:
    segment = Segment(64)
    found = [receive(_sent(segment, 64)) for _ in range(NUM_MARKS)]
    assert segment.send(64) is None
    while found:
        assert segment.is_with_others
        found.pop()
    assert not segment.is_with_others


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_segment_when_a_fork_of_the_receiver_drops_it_then_the_receiver_has_it_still() -> None:
    segment = Segment(64)
    found = receive(_sent(segment, 64))
    child = os.fork()
    if not child:
        del found
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    assert segment.is_with_others
    assert len(found) == 64


def test_receive_when_the_sender_is_gone_or_the_file_another_then_error() -> None:
    segment, other = Segment(64), Segment(64)
    sent = _sent(segment, 64)
    with pytest.raises(CorruptDataError, match="another file"):
        receive(replace(sent, fd=_sent(other, 64).fd))
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(PeerLostError, match=str(child)):
        receive(replace(sent, pid=child))


def test_segment_when_dropped_then_its_descriptor_is_closed_and_receivers_keep_the_content() -> None:
    num_fds = len(os.listdir("/proc/self/fd"))
    segment = Segment(64)
    segment.lend(64)[:] = np.arange(64)
    found = receive(_sent(segment, 64))
    del segment
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= num_fds + 1  # mmap has one of its own
    assert found.tolist() == list(range(64))


def test_receive_when_a_segment_comes_again_then_it_is_mapped_still() -> None:
    segment = Segment(10_000)
    first = receive(_sent(segment, 100))
    address = first.ctypes.data
    del first
    gc.collect()
    again = receive(_sent(segment, 10_000))
    assert (again.ctypes.data, len(again)) == (address, 10_000)


def test_receive_when_segments_are_many_then_only_the_last_stay_mapped() -> None:
    mapped = MappedSegments()
    segments = [Segment(64) for _ in range(MAX_KEPT + 3)]
    for segment in segments:
        mapped.get(_sent(segment, 64))
    assert len(mapped) == MAX_KEPT
    large = Segment(MAX_KEPT_NBYTES + 1)
    mapped.get(_sent(large, 1))
    assert len(mapped) == 1


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_receive_when_a_sender_has_ended_then_its_segments_go_with_the_next() -> None:
    mapped, here = MappedSegments(), Segment(64)
    (reading, writing), (held, ends) = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        segment = Segment(64)
        os.write(writing, pickle.dumps(_sent(segment, 64)))
        os.close(ends)
        os.read(held, 1)  # until the parent has it
        os._exit(0)
    mapped.get(pickle.loads(os.read(reading, 4096)))
    os.close(ends)
    os.waitpid(child, 0)
    assert len(mapped) == 1
    mapped.get(_sent(here, 64))
    assert len(mapped) == 1
    for fd in (reading, writing, held):
        os.close(fd)
