from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from tdserve.base.errors import RemoteProtocolError, SelectionError, TransferAbortedError
from tdserve.control.status import decode_failure
from tdserve.messages.content import ReadStatus, make_rows_layout, read_layout, select_spec, write_layout
from tdserve.messages.layout import Layout
from tdserve.messages.row_numbers import encode_rows
from tdserve.messages.selection.selection import parse
from tdserve.structure.tensors.torch_types import view_bytes
from tdserve.transport.sources_sinks import FlatBuffer
from tdserve.transport.stream import pack, start_send, unpack
from tdserve.v1 import content_pb2, control_pb2, worker_pb2
from tdserve.values.value_columns import ValueColumn, decode_block, encode_block
from tdserve.worker.operations import MAX_QUICK_BYTES, MAX_QUICK_VALUES_BYTES, OPERATIONS, is_quick
from tdserve.worker.transfers import MAX_UNAWAITED_BYTES
from tests.unit.worker.peer import TIMEOUT_S, Peer, StoredTensorDict, receive, sampling

SMALL = [content_pb2.Path(parts=("small",))]
EVERYTHING = 1 << 30
"""An inline limit above everything here."""


def columns(layout: Layout, content: bytes) -> dict[str, torch.Tensor]:
    """Concatenates messages, as uint8 by the last key."""
    buffer = torch.zeros(layout.nbytes, dtype=torch.uint8)
    unpack(content, layout.messages, FlatBuffer(buffer))
    return {slot.path[-1]: buffer[slot.offset : slot.offset + slot.nbytes] for slot in layout.slots}


def numbers(column: torch.Tensor) -> list[int]:
    """Returns an int64 column."""
    found: list[int] = column.view(torch.int64).tolist()
    return found


def rows(*found: int) -> bytes:
    """Encodes row numbers as in orders."""
    return encode_rows(np.array(found, np.int64))


@pytest.fixture
def filled(peer: Peer, store: StoredTensorDict) -> StoredTensorDict:
    """Returns the store with its one non-tensor value."""
    block = encode_block([ValueColumn(False, [b"text"])])
    put = worker_pb2.PutValues(store=store.ref, values=block, keys=[content_pb2.Path(parts=("n", "v"))])
    peer.done(put_values=put)
    return store


def test_operations_when_listed_then_one_for_every_order() -> None:
    bodies = {field.name for field in worker_pb2.Order.DESCRIPTOR.oneofs_by_name["body"].fields}
    assert set(OPERATIONS) == bodies - {
        "open_session",
        "close_session",
        "close_channel",
        "rendezvous",
        "drop_store",
        "forget_specs",
        "mail",
        "take_counts",
        "checksum_version",
        "prepare_claim",
        "open_claim",
    }


def test_is_quick_when_few_bytes_of_an_open_store_then_true(peer: Peer, plain: StoredTensorDict) -> None:
    order = sampling(plain, [1, 2])
    assert not is_quick(peer.session.lane, order)  # to map it takes a while
    peer.context.stores.learn(plain.ref.fingerprint, plain.ref.spec)
    peer.context.stores.get(plain.ref)
    assert is_quick(peer.session.lane, order)
    most = MAX_UNAWAITED_BYTES // (8 + 8 + 8)  # a row, its number and its generation; then gaps, and a status
    assert is_quick(peer.session.lane, sampling(plain, [0] * (most - 16)))
    assert not is_quick(peer.session.lane, sampling(plain, [0] * (most + 1)))  # its sending waits for the client
    most = MAX_QUICK_BYTES // 8
    assert not is_quick(peer.session.lane, sampling(plain, [0] * (most + 1)))
    assert not is_quick(peer.session.lane, sampling(plain, [*range(most), *range(most)]))  # of which few bytes tell
    order.send_rows.inline = True
    assert not is_quick(peer.session.lane, order)


def test_is_quick_when_rows_have_values_or_it_is_another_order_then_false(peer: Peer, tmp_path: Path) -> None:
    with_values = StoredTensorDict(tmp_path / "store", TensorDict({"small": torch.arange(6), "v": "text"}, [6]))
    peer.context.stores.learn(with_values.ref.fingerprint, with_values.ref.spec)
    peer.context.stores.get(with_values.ref)
    assert not is_quick(peer.session.lane, sampling(with_values, [1]))
    assert not is_quick(peer.session.lane, worker_pb2.Order(discard=worker_pb2.Discard()))
    assert not is_quick(peer.session.lane, worker_pb2.Order())


def test_is_quick_when_local_values_come_then_as_long_as_no_other_order_would_wait(peer: Peer) -> None:
    order = worker_pb2.Order(put_values=worker_pb2.PutValues(spool_nbytes=MAX_QUICK_VALUES_BYTES))
    assert not is_quick(peer.session.lane, order)
    alone = replace(peer.context, has_clients=lambda: False)
    peer.session.lane.context = alone
    assert is_quick(peer.session.lane, order)
    order.put_values.spool_nbytes += 1
    assert not is_quick(peer.session.lane, order)


def test_send_rows_when_one_was_overwritten_then_it_is_marked(peer: Peer, filled: StoredTensorDict) -> None:
    filled.generations.values[4] = 3  # a writer has it
    generations = np.array([2, 2, 2], np.int64).tobytes()
    order = worker_pb2.SendRows(store=filled.ref, rows=rows(5, 4, 0), generations=generations, inline=True)
    done = peer.done(send_rows=order)
    found = columns(make_rows_layout(filled.spec, 3), done.inline)
    assert numbers(found["small"])[::2] == [5, 0]
    assert numbers(found["index"]) == [5, 4, 0]
    assert numbers(found["generation"]) == [2, -2, 2]
    assert numbers(found["status"]) == [ReadStatus.WHOLE, 0, 1, 0, 0, 0, 0, 0]
    assert b"text" in done.values


def test_send_rows_when_large_then_values_first_and_content_over_the_channel(
    peer: Peer, filled: StoredTensorDict
) -> None:
    peer.open_channel()
    generations = np.full(6, 2, np.int64).tobytes()
    order = worker_pb2.SendRows(store=filled.ref, rows=rows(*range(6)), generations=generations)
    peer.put(worker_pb2.Order(tag=9, send_rows=order))
    layout = make_rows_layout(filled.spec, 6)
    content = b"".join(buffer.numpy().tobytes() for buffer in receive(peer, layout.message_nbytes, 9))
    assert torch.equal(columns(layout, content)["large"], view_bytes(filled.leaves[("large",)]))
    prepared, done = peer.next_report(), peer.next_report()
    assert b"text" in prepared.prepared.values
    assert done.done.nbytes_moved == len(content)


def test_receive_rows_when_sent_then_in_their_places_and_nowhere_else(peer: Peer, store: StoredTensorDict) -> None:
    peer.open_channel()
    before = store.leaves[("large",)].clone()
    layout = write_layout(store.spec.with_rows(2))
    buffer = torch.randint(0, 256, (layout.nbytes,), dtype=torch.uint8)
    content = control_pb2.Content(message_nbytes=layout.message_nbytes)
    order = worker_pb2.ReceiveRows(store=store.ref, rows=rows(5, 0), content=content)
    peer.put(worker_pb2.Order(tag=9, receive_rows=order))
    peer.channel.wait_all(
        start_send(peer.channel, 9, layout.messages, FlatBuffer(buffer), peer.context.pool), TIMEOUT_S
    )
    assert peer.next_report().HasField("done")
    sent = columns(layout, pack(layout.messages, FlatBuffer(buffer)))["large"]
    assert torch.equal(view_bytes(store.leaves[("large",)][[5, 0]]), sent)
    assert torch.equal(store.leaves[("large",)][1:5], before[1:5])


def test_receive_rows_when_leaves_are_looked_at_then_their_bytes_are_reported(
    peer: Peer, plain: StoredTensorDict
) -> None:
    content = control_pb2.Content(inline=np.array([71, 72], "<i8").tobytes())
    order = worker_pb2.ReceiveRows(store=plain.ref, rows=rows(5, 0), content=content, columns=SMALL)
    done = peer.done(receive_rows=order)
    assert list(done.columns) == [np.array([71, 72], "<i8").tobytes()]
    assert plain.leaves[("small",)].tolist() == [72, 1, 2, 3, 4, 71]


def test_receive_rows_when_some_leaves_come_then_the_others_of_these_rows_are_zeros(
    peer: Peer, store: StoredTensorDict
) -> None:
    others = store.leaves[("large",)][1:5].clone()
    content = control_pb2.Content(inline=np.array([71, 72], "<i8").tobytes())
    peer.done(receive_rows=worker_pb2.ReceiveRows(store=store.ref, rows=rows(5, 0), content=content, keys=SMALL))
    assert store.leaves[("small",)].tolist() == [72, 1, 2, 3, 4, 71]
    assert not store.leaves[("large",)][[0, 5]].any()
    assert torch.equal(store.leaves[("large",)][1:5], others)


def test_receive_rows_when_the_content_is_that_of_other_leaves_then_refused(
    peer: Peer, store: StoredTensorDict
) -> None:
    content = control_pb2.Content(inline=bytes(17))
    order = worker_pb2.ReceiveRows(store=store.ref, rows=rows(5, 0), content=content, keys=SMALL)
    assert isinstance(peer.error(receive_rows=order), RemoteProtocolError)
    assert store.leaves[("small",)].tolist() == [0, 1, 2, 3, 4, 5]


def test_send_rows_when_the_table_adds_columns_then_they_follow_the_generations(
    peer: Peer, plain: StoredTensorDict
) -> None:
    added = {
        "priority": np.array([0.5, 2.0], "<f4"),
        "times_sampled": np.array([3, 4], "<i8"),
        "slice_end": np.array([False, True]),
    }
    order = worker_pb2.SendRows(
        store=plain.ref, rows=rows(5, 0), generations=np.array([2, 2], "<i8").tobytes(), inline=True
    )
    for name, column in added.items():
        order.columns.add(name=name, content=column.tobytes())
    found = columns(make_rows_layout(plain.spec, 2, tuple(added)), peer.done(send_rows=order).inline)
    assert numbers(found["small"]) == [5, 0]
    assert numbers(found["generation"]) == [2, 2]
    assert {name: found[name].numpy().tobytes() for name in added} == {
        name: column.tobytes() for name, column in added.items()
    }


def test_send_rows_when_a_part_of_one_is_being_written_then_it_is_marked(peer: Peer, plain: StoredTensorDict) -> None:
    plain.generations.values[4] = 5
    order = worker_pb2.SendRows(
        store=plain.ref, rows=rows(4, 5), generations=np.array([5, 2], "<i8").tobytes(), inline=True
    )
    found = columns(make_rows_layout(plain.spec, 2), peer.done(send_rows=order).inline)
    assert numbers(found["generation"]) == [-5, 2]


def test_read_columns_when_asked_then_the_bytes_of_these_rows(peer: Peer, store: StoredTensorDict) -> None:
    order = worker_pb2.ReadColumns(
        store=store.ref, rows=rows(4, 0, 4), keys=[*SMALL, content_pb2.Path(parts=("large",))]
    )
    small, large = peer.done(read_columns=order).columns
    assert small == np.array([4, 0, 4], "<i8").tobytes()
    assert large == store.leaves[("large",)][[4, 0, 4]].numpy().tobytes()


def test_read_columns_when_of_no_rows_then_no_bytes(peer: Peer, plain: StoredTensorDict) -> None:
    assert list(peer.done(read_columns=worker_pb2.ReadColumns(store=plain.ref, keys=SMALL)).columns) == [b""]


def test_read_columns_when_a_leaf_is_no_tensor_then_its_values(peer: Peer, filled: StoredTensorDict) -> None:
    order = worker_pb2.ReadColumns(store=filled.ref, rows=rows(4, 0), keys=[content_pb2.Path(parts=("n", "v"))])
    (block,) = peer.done(read_columns=order).columns
    (column,) = decode_block(block)
    assert list(column.values) == [b"text"]


def test_send_selection_when_small_then_inline_with_status(peer: Peer, store: StoredTensorDict) -> None:
    selection = parse(slice(None, None, 2))
    order = worker_pb2.SendSelection(
        store=store.ref, selection=selection.to_message(), keys=SMALL, inline_bytes=EVERYTHING
    )
    layout = read_layout(select_spec(store.spec, selection, [("small",)]))
    found = columns(layout, peer.done(send_selection=order).inline)
    assert numbers(found["small"]) == [0, 2, 4]
    assert numbers(found["status"])[:2] == [ReadStatus.WHOLE, 1]
    assert peer.context.stores.find_readable("store") is not None  # control has let somebody read it


def test_send_selection_when_the_client_waits_already_then_nothing_is_announced(
    peer: Peer, store: StoredTensorDict
) -> None:
    peer.open_channel()
    layout = read_layout(select_spec(store.spec, parse(()), [("small",)]))
    body = worker_pb2.SendSelection(store=store.ref, inline_bytes=EVERYTHING, keys=SMALL)
    body.expected_nbytes.extend(layout.message_nbytes)
    peer.put(worker_pb2.Order(tag=4, send_selection=body))
    (content,) = receive(peer, layout.message_nbytes, 4)
    assert numbers(content[-64:])[:2] == [ReadStatus.WHOLE, 1]
    report = peer.next_report()
    assert (report.WhichOneof("body"), report.done.nbytes_moved) == ("done", sum(layout.message_nbytes))


def test_send_selection_when_the_client_waits_for_other_content_then_nothing_is_sent(
    peer: Peer, store: StoredTensorDict
) -> None:
    order = worker_pb2.SendSelection(store=store.ref, keys=SMALL, expected_nbytes=[64])
    assert isinstance(peer.error(send_selection=order), RemoteProtocolError)


def test_send_selection_when_the_index_does_not_fit_then_error_and_nothing_is_announced(
    peer: Peer, store: StoredTensorDict
) -> None:
    order = worker_pb2.SendSelection(store=store.ref, selection=parse(6).to_message())
    assert isinstance(peer.error(send_selection=order), SelectionError)


def test_send_selection_when_a_write_does_not_end_then_given_up(store: StoredTensorDict) -> None:
    peer = Peer(transfer_timeout_s=0.01)
    store.generations.values[-1] = 3
    order = worker_pb2.SendSelection(store=store.ref, inline_bytes=EVERYTHING, keys=SMALL)
    number = peer.put(worker_pb2.Order(send_selection=order))
    lost, failed = peer.next_report(), peer.next_report()
    assert lost.HasField("channel_lost")
    assert failed.order == number
    assert isinstance(decode_failure(failed.failure), TransferAbortedError)
    peer.close()


def test_staged_write_when_applied_twice_then_as_once(peer: Peer, store: StoredTensorDict, tmp_path: Path) -> None:
    peer.open_channel()
    selection = parse([5, 0])
    layout = write_layout(select_spec(store.spec, selection, []))
    buffer = torch.randint(0, 256, (layout.nbytes,), dtype=torch.uint8)
    content = control_pb2.Content(message_nbytes=layout.message_nbytes)
    common: dict[str, Any] = {"store": store.ref, "selection": selection.to_message(), "content": content}
    staged = worker_pb2.ReceiveSelection(**common, staging=str(tmp_path / "staging" / "0"))
    peer.put(worker_pb2.Order(tag=3, receive_selection=staged))
    before = store.leaves[("large",)].clone()
    peer.channel.wait_all(
        start_send(peer.channel, 3, layout.messages, FlatBuffer(buffer), peer.context.pool), TIMEOUT_S
    )
    assert peer.next_report().HasField("done")
    assert torch.equal(store.leaves[("large",)], before)
    for _ in range(2):
        peer.done(apply_staged=worker_pb2.ApplyStaged(**common, staging=staged.staging))
        sent = columns(layout, pack(layout.messages, FlatBuffer(buffer)))["large"]
        assert torch.equal(view_bytes(store.leaves[("large",)][[5, 0]]), sent)
    assert torch.equal(store.leaves[("large",)][1:5], before[1:5])


def test_apply_when_inline_content_is_too_short_then_refused_and_nothing_written(
    peer: Peer, store: StoredTensorDict
) -> None:
    order = worker_pb2.ApplyStaged(store=store.ref, keys=SMALL, content=control_pb2.Content(inline=b"short"))
    assert isinstance(peer.error(apply_staged=order), RemoteProtocolError)
    assert store.leaves[("small",)].tolist() == [0, 1, 2, 3, 4, 5]


def test_send_void_when_a_read_was_refused_then_zeros_and_the_status_failed(peer: Peer) -> None:
    peer.open_channel()
    peer.put(worker_pb2.Order(tag=4, send_void=worker_pb2.SendVoid(message_nbytes=[100, 128])))
    first, last = receive(peer, (100, 128), 4)
    assert not first.any()
    assert numbers(last[64:]) == [ReadStatus.FAILED, 0, 0, 0, 0, 0, 0, 0]
    assert peer.next_report().done.nbytes_moved == 228


def test_discard_when_done_then_the_channel_is_free_for_the_next(peer: Peer) -> None:
    peer.open_channel()
    peer.put(worker_pb2.Order(tag=4, discard=worker_pb2.Discard(message_nbytes=[100, 128])))
    for nbytes in (100, 128):
        peer.channel.send(torch.zeros(nbytes, dtype=torch.uint8), 4).wait(TIMEOUT_S)
    assert peer.next_report().done.nbytes_moved == 228


VALUES = encode_block([ValueColumn(True, [b"v5", b"v0" * 40_000])])


def extending(store: StoredTensorDict, **fields: Any) -> worker_pb2.ReceiveRows:
    """Returns an order that extends by rows 5 and 0: one small leaf, with values behind it."""
    content = control_pb2.Content(message_nbytes=[16, len(VALUES)], values_nbytes=len(VALUES))
    return worker_pb2.ReceiveRows(store=store.ref, rows=rows(5, 0), content=content, keys=SMALL, **fields)


def send_rows_and_values(peer: Peer) -> None:
    """Sends rows and values as the client does."""
    content = [np.array([71, 72], "<i8").view(np.uint8), np.frombuffer(bytearray(VALUES), np.uint8)]
    peer.channel.wait_all([peer.channel.send(torch.from_numpy(each), 9) for each in content], TIMEOUT_S)


def values_of(peer: Peer, store: StoredTensorDict) -> list[bytes]:
    """Returns the content of rows 5 and 0."""
    wanted = worker_pb2.ReadValues(store=store.ref, keys=[content_pb2.Path(parts=["v"])], elements=rows(5, 0))
    return list(decode_block(peer.done(read_values=wanted).values)[0].values)


@pytest.fixture
def texts(peer: Peer, tmp_path: Path) -> StoredTensorDict:
    """Opens a store with a small leaf and a value per row; the channel is open."""
    peer.open_channel()
    values = NonTensorStack(*(NonTensorData(f"old {number}") for number in range(6)))
    return StoredTensorDict(tmp_path / "texts", TensorDict({"small": torch.arange(6), "v": values}, [6]))


def test_receive_rows_when_values_follow_then_stored_at_once(peer: Peer, texts: StoredTensorDict) -> None:
    storing = worker_pb2.PutValues(keys=[content_pb2.Path(parts=["v"])], elements=rows(5, 0))
    peer.put(worker_pb2.Order(tag=9, is_accepted=True, receive_rows=extending(texts, put_values=storing)))
    send_rows_and_values(peer)
    assert peer.next_report().done.nbytes_moved == 16 + len(VALUES)
    assert texts.leaves[("small",)].tolist() == [72, 1, 2, 3, 4, 71]
    assert values_of(peer, texts) == [b"v5", b"v0" * 40_000]


def test_receive_rows_when_the_values_are_refused_then_the_channel_goes_on(peer: Peer, texts: StoredTensorDict) -> None:
    storing = worker_pb2.PutValues(keys=[content_pb2.Path(parts=["v"])], elements=rows(5, 0, 1))
    for _ in range(2):
        peer.put(worker_pb2.Order(tag=9, is_accepted=True, receive_rows=extending(texts, put_values=storing)))
        send_rows_and_values(peer)
        assert isinstance(decode_failure(peer.next_report().failure), RemoteProtocolError)
    assert peer.reports.empty()


def test_receive_rows_when_values_go_to_a_file_then_stored_from_there(
    peer: Peer, texts: StoredTensorDict, tmp_path: Path
) -> None:
    spool = str(tmp_path / "staging" / "0.values")
    peer.put(worker_pb2.Order(tag=9, is_accepted=True, receive_rows=extending(texts, spool=spool)))
    send_rows_and_values(peer)
    assert peer.next_report().HasField("done")
    storing = worker_pb2.PutValues(store=texts.ref, keys=[content_pb2.Path(parts=["v"])], elements=rows(5, 0))
    storing.spool, storing.spool_nbytes = spool, len(VALUES)
    peer.done(put_values=storing)
    assert values_of(peer, texts) == [b"v5", b"v0" * 40_000]
