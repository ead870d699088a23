from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from tdserve.data.mapped_stores import OpenStores
from tdserve.messages.content import ReadStatus, read_layout, select_spec
from tdserve.messages.layout import Layout, Message
from tdserve.messages.selection.selection import parse
from tdserve.rules.tags import make_tag
from tdserve.transport.sources_sinks import FlatBuffer, Source
from tdserve.transport.stream import pack, unpack
from tdserve.v1 import content_pb2, control_pb2
from tdserve.worker.small_reads import SENT, ReadCounts, SmallReads
from tests.unit.worker.peer import INLINE_BYTES, UID, StoredTensorDict

REQUEST = 9


@pytest.fixture
def stores(store: StoredTensorDict) -> OpenStores:
    """The worker's, after control has let somebody read the store."""
    made = OpenStores(writes_values=True)
    made.learn(store.ref.fingerprint, store.ref.spec)
    made.remember_readable(made.get(store.ref))
    return made


@pytest.fixture
def reads(stores: OpenStores) -> SmallReads:
    """Of that worker."""
    return SmallReads(stores, inline_bytes=INLINE_BYTES)


def asked(known: StoredTensorDict, index: Any = (), *keys: str, **fields: Any) -> control_pb2.ReadRequest:
    """A request for what an index and keys select, by default of the small leaf; of a client that knows the store."""
    selection = parse(index).to_message()
    paths = [content_pb2.Path(parts=[key]) for key in keys or ("small",)]
    good = {"store": "store", "selection": selection, "keys": paths, "fingerprint": known.spec.fingerprint}
    return control_pb2.ReadRequest(**{**good, **fields})


def message(read: control_pb2.ReadRequest) -> bytes:
    """As it comes over the channel."""
    return control_pb2.ClientMessage(request=REQUEST, read=read).SerializeToString()


def columns(store: StoredTensorDict, index: Any, content: bytes) -> tuple[list[int], list[int]]:
    """The small leaf, flat, and the status."""
    layout = read_layout(select_spec(store.spec, parse(index), [("small",)]))
    buffer = torch.zeros(layout.nbytes, dtype=torch.uint8)
    unpack(content, layout.messages, FlatBuffer(buffer))
    small, status = (buffer[slot.offset : slot.offset + slot.nbytes].view(torch.int64) for slot in layout.slots)
    return small.tolist(), status.tolist()


@pytest.mark.parametrize(
    ("index", "rows"),
    [
        ((), [0, 1, 2, 3, 4, 5]),
        (slice(None), [0, 1, 2, 3, 4, 5]),
        (3, [3]),
        (slice(4, None, -2), [4, 2, 0]),
        ([5, 0, 5], [5, 0, 5]),
        (np.array([False, True, False, False, True, False]), [1, 4]),
        (slice(0, 0), []),
    ],
)
def test_answer_when_the_read_is_small_then_the_content_as_control_would_have_it_sent(
    reads: SmallReads, store: StoredTensorDict, index: Any, rows: list[int]
) -> None:
    found = reads.answer(message(asked(store, index)))
    assert found is not None
    answer = control_pb2.ServerMessage.FromString(found)
    assert answer.request == REQUEST
    assert answer.done.accepted == control_pb2.Accepted(fingerprint=store.spec.fingerprint, version=1)
    assert columns(store, index, answer.done.inline) == (rows, [ReadStatus.WHOLE, 1, 0, 0, 0, 0, 0, 0])
    assert reads.take_counts() == ReadCounts(num_inline=1, nbytes_inline=len(answer.done.inline))
    assert reads.take_counts() == ReadCounts()


def test_answer_when_a_write_was_committed_meanwhile_then_its_content_and_version(
    reads: SmallReads, store: StoredTensorDict
) -> None:
    assert reads.answer(message(asked(store))) is not None
    store.leaves[("small",)][2] = 77
    store.generations.values[2] += 2
    store.generations.values[-1] += 2
    answer = control_pb2.ServerMessage.FromString(reads.answer(message(asked(store))) or b"")
    small, status = columns(store, (), answer.done.inline)
    assert small == [0, 1, 77, 3, 4, 5]
    assert (status[:2], answer.done.accepted.version) == ([ReadStatus.WHOLE, 2], 2)


def test_answer_when_another_row_is_being_written_then_of_those_that_are_not(
    reads: SmallReads, store: StoredTensorDict
) -> None:
    store.generations.values[2] = 3
    assert reads.answer(message(asked(store, [1, 3]))) is not None
    assert reads.answer(message(asked(store, [1, 2]))) is None


DECLINED: dict[str, Callable[[StoredTensorDict], bytes]] = {
    "of another structure": lambda store: message(asked(store, fingerprint=b"older")),
    "of a structure to be told": lambda store: message(asked(store, fingerprint=b"")),
    "of a store that was never granted": lambda store: message(asked(store, store="other")),
    "newer than": lambda store: message(asked(store, newer_than=0)),
    "of another kind of store": lambda store: message(asked(store, kind=control_pb2.STORE_KIND_REPLAY)),
    "too large": lambda store: message(asked(store, 0, "large")),
    "with values": lambda store: message(asked(store, (), "small", "n")),
    "of a key that is not there": lambda store: message(asked(store, (), "no")),
    "out of range": lambda store: message(asked(store, 6)),
    "of too many dimensions": lambda store: message(asked(store, (0, 0))),
    "no read": lambda store: control_pb2.ClientMessage(
        request=REQUEST, latest=control_pb2.LatestRequest(store="store")
    ).SerializeToString(),
    "empty": lambda store: b"",
    "garbage": lambda store: b"\xff" * 20,
    "cut off": lambda store: message(asked(store))[:-1],
}


@pytest.mark.parametrize("make", DECLINED.values(), ids=list(DECLINED))
def test_answer_when_control_must_be_asked_then_none(
    reads: SmallReads, store: StoredTensorDict, make: Callable[[StoredTensorDict], bytes]
) -> None:
    assert reads.answer(make(store)) is None
    assert reads.take_counts() == ReadCounts()


def test_answer_when_the_size_is_exactly_the_limit_then_given(stores: OpenStores, store: StoredTensorDict) -> None:
    nbytes = sum(read_layout(select_spec(store.spec, parse(()), [("small",)])).message_nbytes)
    assert SmallReads(stores, inline_bytes=nbytes).answer(message(asked(store))) is not None
    assert SmallReads(stores, inline_bytes=nbytes - 1).answer(message(asked(store))) is None


def test_answer_when_the_whole_store_is_being_written_then_none(reads: SmallReads, store: StoredTensorDict) -> None:
    store.generations.values[-1] = 3
    assert reads.answer(message(asked(store))) is None


def test_answer_when_the_store_was_deleted_then_none(reads: SmallReads, store: StoredTensorDict) -> None:
    assert reads.answer(message(asked(store))) is not None
    store.generations.mark_deleted()  # the worker is not told yet
    assert reads.answer(message(asked(store))) is None


def test_answer_when_the_store_was_dropped_then_none(
    reads: SmallReads, stores: OpenStores, store: StoredTensorDict
) -> None:
    stores.drop(UID)
    assert reads.answer(message(asked(store))) is None


def test_answer_when_any_byte_of_the_request_is_another_then_an_answer_or_none_but_no_error(
    reads: SmallReads, store: StoredTensorDict
) -> None:
    good = message(asked(store, ([5, 0], ...)))
    for at in range(len(good)):
        for byte in (0, 1, 8, 127, 128, 255):
            found = reads.answer(good[:at] + bytes([byte]) + good[at + 1 :])
            assert found is None or control_pb2.ServerMessage.FromString(found).HasField("done")


def expecting(known: StoredTensorDict, key: str, **fields: Any) -> tuple[control_pb2.ReadRequest, Layout]:
    """A read of a whole leaf whose content the client waits for already, and the layout of that."""
    layout = read_layout(select_spec(known.spec, parse(()), [(key,)]))
    return asked(known, (), key, **{"message_nbytes": layout.message_nbytes, **fields}), layout


def test_answer_when_the_client_waits_for_the_content_then_that_is_the_answer(
    reads: SmallReads, store: StoredTensorDict
) -> None:
    sent: list[tuple[int, bytes]] = []

    def send(tag: int, messages: Sequence[Message], source: Source) -> None:
        sent.append((tag, pack(messages, source)))

    read, layout = expecting(store, "small")
    assert reads.answer(message(read), send) == SENT
    ((tag, content),) = sent
    assert tag == make_tag(REQUEST)
    assert columns(store, (), content) == ([0, 1, 2, 3, 4, 5], [ReadStatus.WHOLE, 1, 0, 0, 0, 0, 0, 0])
    assert reads.take_counts() == ReadCounts(num_sent=1, nbytes_sent=sum(layout.message_nbytes))


@pytest.mark.parametrize(
    "fields",
    [{"message_nbytes": [64]}, {"message_nbytes": [32, 32]}, {"fingerprint": b"older"}, {"newer_than": 0}],
    ids=["of another size", "of another number of messages", "of another structure", "newer than"],
)
def test_answer_when_the_client_waits_for_other_content_then_control_is_asked(
    reads: SmallReads, store: StoredTensorDict, fields: dict[str, Any]
) -> None:
    read, _ = expecting(store, "small", **fields)
    assert reads.answer(message(read), lambda *_: pytest.fail("something was sent")) is None


def test_answer_when_the_client_waits_on_a_channel_that_is_lost_then_control_is_asked(
    reads: SmallReads, store: StoredTensorDict
) -> None:
    read, _ = expecting(store, "small")
    nothing = lambda *_: pytest.fail("something was sent")  # noqa: E731
    assert reads.answer(message(read), nothing, channel_number=1) is None


def test_answer_when_the_channel_is_busy_or_a_row_is_written_then_control_is_asked(
    reads: SmallReads, store: StoredTensorDict
) -> None:
    read, _ = expecting(store, "small")
    assert reads.answer(message(read)) is None
    store.generations.values[-1] = 3
    assert reads.answer(message(read), lambda *_: pytest.fail("something was sent")) is None
    assert reads.take_counts() == ReadCounts()
