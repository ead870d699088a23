"""A session of a data worker. A control process that keeps reports, and a client, are at its other ends."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path as FilePath
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from tdserve.base.errors import TDServeError
from tdserve.control.status import decode_failure
from tdserve.data.mapped_stores import OpenStores
from tdserve.messages.row_numbers import encode_rows
from tdserve.store.rows import leaf_folders
from tdserve.store.rows.generations import FILE_NAME, Generations
from tdserve.store.rows.mapping import open_leaves
from tdserve.structure.captures.capture import capture
from tdserve.structure.trees import codec
from tdserve.structure.trees.tree import Spec
from tdserve.transport.gloo import CLIENT_RANK, GlooChannel
from tdserve.transport.message_channel import MessageChannel
from tdserve.transport.pool import BufferPool
from tdserve.transport.proving import make_session_credential
from tdserve.transport.rendezvous import KVStore
from tdserve.v1 import control_pb2, worker_pb2
from tdserve.worker.lane import WorkerContext
from tdserve.worker.operations import is_quick, perform
from tdserve.worker.small_reads import SmallReads
from tdserve.worker.worker_claims import WorkerClaims
from tdserve.worker.worker_session import WorkerSession
from tests.gloo_secret import SECRET

TIMEOUT_S = 20.0
UID = "0123456789abcdef" * 2
CLIENT_ID = bytes(range(16))
INLINE_BYTES = 1000
"""Size of an answer that the worker sends inline."""


class StoredTensorDict:
    """A store's files, filled from a tensordict; non-tensor values are put by orders.

    Attributes:
        ref: The reference to the store in orders.
        leaves: Its mapped tensors by path.
        generations: Generations of the rows, as control maps them.
    """

    def __init__(self, folder: FilePath, td: Any, *, uid: str = UID) -> None:
        captured = capture(td)
        self.spec: Spec = captured.spec
        folder.parent.mkdir(parents=True, exist_ok=True)
        leaf_folders.create(folder, self.spec)
        num_rows = self.spec.num_rows
        self.generations = Generations.create(folder / FILE_NAME, uid=uid, num_rows=num_rows + 1)
        self.generations.values[:] = 2
        self.leaves = open_leaves(folder, self.spec)
        for path, leaf in self.leaves.items():
            leaf.copy_(captured.tensors[path])
        self.ref = worker_pb2.StoreRef(
            uid=uid, folder=str(folder), fingerprint=self.spec.fingerprint, spec=codec.encode(self.spec)
        )


def plain_store(folder: FilePath) -> StoredTensorDict:
    """Creates six rows of small tensors."""
    return StoredTensorDict(folder, TensorDict({"small": torch.arange(6)}, [6]))


def mixed_store(folder: FilePath) -> StoredTensorDict:
    """Creates six rows of small tensors and one leaf of 6 MB."""
    td = TensorDict({"small": torch.arange(6), "large": torch.rand(6, 250_000), "n": {"v": "text"}}, [6])
    return StoredTensorDict(folder, td)


class Peer:
    """Gives orders to a session and receives its reports; ``channel`` is the client's end of its channel."""

    def __init__(self, *, transfer_timeout_s: float = TIMEOUT_S) -> None:
        self.reports: SimpleQueue[worker_pb2.Report] = SimpleQueue()
        stores = OpenStores(writes_values=True)
        self.context = WorkerContext(
            stores=stores,
            worker_claims=WorkerClaims(stores, self._on_report),
            small_reads=SmallReads(stores, inline_bytes=INLINE_BYTES),
            pool=BufferPool(),
            report=self._on_report,
            transfer_timeout_s=transfer_timeout_s,
        )
        others = set(threading.enumerate())
        self.session = WorkerSession(7, self.context, perform, is_quick)
        self._threads = set(threading.enumerate()) - others
        self._kv_stores = {is_mail: KVStore(partial(self._publish, is_mail)) for is_mail in (False, True)}
        self._last_order = self._number = 0
        self.mails: SimpleQueue[bytes] = SimpleQueue()
        self.channel: GlooChannel

    def open_channel(self, number: int = 0) -> None:
        """Opens both ends, as after a rendezvous."""
        self.channel = self._connect(is_mail=False, number=number)

    def open_mail(self) -> MessageChannel:
        """Opens the control channel and returns the client's end; its messages are collected in ``mails``."""
        channel = self._connect(is_mail=True)
        mail = MessageChannel(
            channel,
            on_message=lambda content, _: self.mails.put(content),
            on_lost=lambda error: None,
            name="client-mail",
        )
        mail.begin()
        return mail

    def put(self, order: worker_pb2.Order) -> int:
        """Queues an order and returns its number."""
        self._last_order += 1
        order.order, order.session = self._last_order, self.session.number
        body = getattr(order, order.WhichOneof("body") or "", None)
        ref = getattr(body, "store", None) or getattr(body, "version", None)
        if ref is not None and ref.HasField("spec"):  # as the worker's main thread does
            self.context.stores.learn(ref.fingerprint, ref.spec)
        self.session.put(order)
        return self._last_order

    def next_report(self) -> worker_pb2.Report:
        """Returns the oldest report that was not taken, without those of a rendezvous."""
        return self.reports.get(timeout=TIMEOUT_S)

    def done(self, **body: Any) -> worker_pb2.Worked:
        """Has an order carried out and returns its report."""
        number = self.put(worker_pb2.Order(**body))
        report = self.next_report()
        assert report.order == number
        assert report.HasField("done"), report
        return report.done

    def error(self, **body: Any) -> TDServeError:
        """Has an order carried out that fails; returns the error."""
        number = self.put(worker_pb2.Order(**body))
        report = self.next_report()
        assert report.order == number
        assert report.HasField("failure"), report
        return decode_failure(report.failure)

    def close(self) -> None:
        """Closes both ends."""
        self.session.close()
        for thread in self._threads:
            thread.join(TIMEOUT_S)

    def _connect(self, *, is_mail: bool, number: int = 0) -> GlooChannel:
        self._number = number
        self._kv_stores[is_mail] = KVStore(partial(self._publish, is_mail))
        opening = worker_pb2.OpenSession(
            transport="gloo", host="127.0.0.1", is_mail=is_mail, secret=SECRET, client_id=CLIENT_ID
        )
        self.put(worker_pb2.Order(open_session=opening, channel=number))
        kv_store = self._kv_stores[is_mail]
        with ThreadPoolExecutor(1) as thread:
            credential = make_session_credential(SECRET, self.session.number, is_mail=is_mail, channel_number=number)
            connecting = thread.submit(
                GlooChannel, kv_store, CLIENT_RANK, host="127.0.0.1", credential=credential, peer="the worker"
            )
            channel = connecting.result(TIMEOUT_S)
        assert self.next_report().HasField("done")
        return channel

    def _publish(self, is_mail: bool, key: str, value: bytes) -> None:
        entry = control_pb2.Rendezvous(key=key, value=value, is_mail=is_mail)
        self.session.put(worker_pb2.Order(session=self.session.number, channel=self._number, rendezvous=entry))

    def _on_report(self, report: worker_pb2.Report) -> None:
        if report.HasField("rendezvous"):
            entry = report.rendezvous
            self._kv_stores[entry.is_mail].feed(entry.key, entry.value)
        else:
            self.reports.put(report)


def sampling(store: StoredTensorDict, rows: list[int], *, tag: int = 0) -> worker_pb2.Order:
    """Returns an order for rows of a store, over the channel."""
    order = worker_pb2.Order(tag=tag, is_accepted=True)  # it tells of no values
    order.send_rows.store.CopyFrom(store.ref)
    order.send_rows.rows = encode_rows(np.array(rows, np.int64))
    order.send_rows.generations = np.full(len(rows), 2, np.int64).tobytes()
    return order


def receive(peer: Peer, sizes: tuple[int, ...], tag: int) -> list[torch.Tensor]:
    """Receives what the worker sends to the client."""
    buffers = [torch.zeros(nbytes, dtype=torch.uint8) for nbytes in sizes]
    for buffer in buffers:
        peer.channel.recv(buffer, tag).wait(TIMEOUT_S)
    return buffers
