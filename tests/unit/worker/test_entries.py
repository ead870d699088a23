"""Orders about entries, at the worker."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tdserve.base.errors import KeyNotFoundError
from tdserve.data.stored_entries import decode_entries
from tdserve.rules.kv.keyed_settings import KeyedSettings
from tdserve.store.rows import leaf_folders
from tdserve.store.rows.generations import FILE_NAME, Generations
from tdserve.structure.trees import codec
from tdserve.v1 import control_pb2, worker_pb2
from tdserve.values.value_columns import ValueColumn, encode_block
from tdserve.worker.entry_orders import MAX_QUICK_BYTES, change_entries, is_small_change, list_entries, send_entries
from tdserve.worker.small_reads import SmallReads
from tests.errors import raises
from tests.unit.worker.peer import INLINE_BYTES, UID, Peer

STORED_SPEC = KeyedSettings().make_stored_spec(bytes(32))


@pytest.fixture
def store(tmp_path: Path, peer: Peer) -> worker_pb2.StoreRef:
    """An empty keyed store, whose structure the worker knows."""
    folder = tmp_path / "keyed"
    leaf_folders.create(folder, STORED_SPEC)
    Generations.create(folder / FILE_NAME, uid=UID, num_rows=2).close()
    peer.context.stores.learn(STORED_SPEC.fingerprint, codec.encode(STORED_SPEC))
    return worker_pb2.StoreRef(uid=UID, folder=str(folder), fingerprint=STORED_SPEC.fingerprint)


def putting(store: worker_pb2.StoreRef, *keys: bytes, record: bytes = b"r", request: int = 1) -> worker_pb2.Order:
    """Returns an order to put entries."""
    values = worker_pb2.PutValues(values=encode_block([ValueColumn(True, [record] * len(keys))]))
    change = worker_pb2.ChangeEntries(store=store, keys=keys, values=values, client_id=bytes(16), request=request)
    return worker_pb2.Order(change_entries=change)


def test_store_entries_when_done_then_sent_listed_and_answered_by_mail(peer: Peer, store: worker_pb2.StoreRef) -> None:
    lane, order = peer.session.lane, putting(store, b"a", b"b")
    worked = change_entries(lane, order)
    assert control_pb2.Done.FromString(worked.answer) == control_pb2.Done(version=1)
    assert change_entries(lane, order) == worked, "a retry was carried out again"
    mails: list[tuple[int, bytes]] = []

    def send_mail(session: int, content: bytes) -> bool:
        mails.append((session, content))
        return True

    lane.context = replace(lane.context, send_mail=send_mail)
    order = putting(store, b"c", request=2)
    order.change_entries.mail_session = 7
    assert change_entries(lane, order).is_mailed
    ((session, content),) = mails
    assert (session, control_pb2.ServerMessage.FromString(content).done.version) == (7, 3)

    asked = worker_pb2.SendEntries(store=store, keys=[b"b", b"c"])
    found = decode_entries(send_entries(lane, worker_pb2.Order(send_entries=asked)).values)
    assert found == ([2, 0 + 3], [b"r", b"r"])
    listed = worker_pb2.ListEntries(store=store, request=control_pb2.ListRequest(prefix=b"b"))
    done = control_pb2.Done.FromString(list_entries(lane, worker_pb2.Order(list_entries=listed)).answer)
    assert list(done.keys) == [b"b"]


def test_send_entries_when_one_is_missing_then_refused(peer: Peer, store: worker_pb2.StoreRef) -> None:
    lane = peer.session.lane
    change_entries(lane, putting(store, b"a"))
    for only_checks in (False, True):
        asked = worker_pb2.SendEntries(store=store, keys=[b"a", b"x"], only_checks=only_checks)
        with raises(KeyNotFoundError, key="x"):
            send_entries(lane, worker_pb2.Order(send_entries=asked))
    asked = worker_pb2.SendEntries(store=store, keys=[b"a"], only_checks=True)
    assert send_entries(lane, worker_pb2.Order(send_entries=asked)) == worker_pb2.Worked()


def test_answer_when_a_get_is_small_then_without_control(peer: Peer, store: worker_pb2.StoreRef) -> None:
    lane = peer.session.lane
    reads = SmallReads(lane.context.stores, inline_bytes=INLINE_BYTES)

    def answer(*keys: bytes) -> control_pb2.ServerMessage | None:
        get = control_pb2.GetRequest(store="keyed", keys=keys, fingerprint=STORED_SPEC.fingerprint)
        found = reads.answer(control_pb2.ClientMessage(request=5, get=get).SerializeToString())
        return None if found is None else control_pb2.ServerMessage.FromString(found)

    change_entries(lane, putting(store, b"a"))
    change_entries(lane, putting(store, b"large", record=bytes(INLINE_BYTES + 1), request=2))
    assert answer(b"a") is None, "control has let nobody read it"
    send_entries(lane, worker_pb2.Order(send_entries=worker_pb2.SendEntries(store=store, keys=[b"a"])))
    found = answer(b"a")
    assert found is not None
    assert decode_entries(found.done.accepted.values) == ([1], [b"r"])
    assert answer(b"a", b"x") is None
    assert answer(b"large") is None
    assert answer(*[b"a"] * 400) is None, "its answer does not fit into a mail"
    assert reads.take_counts().num_inline == 1


def test_is_small_change_when_few_bytes_and_no_order_stores_values_then_true(
    peer: Peer, store: worker_pb2.StoreRef
) -> None:
    lane, order = peer.session.lane, putting(store, b"a")
    assert is_small_change(lane, order)
    with lane.context.values_lock:
        assert not is_small_change(lane, order)
    assert not is_small_change(lane, putting(store, b"a", record=bytes(MAX_QUICK_BYTES)))
    order.change_entries.values.spool = "somewhere"
    assert not is_small_change(lane, order)
