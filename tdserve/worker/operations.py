"""The work of each order: gather and send, receive and scatter, make folders. One function per order."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path as FilePath

import numpy as np
import torch
from numpy.typing import NDArray

from tdserve.base.errors import CorruptDataError, DeadlineExceededError, RemoteProtocolError, TransferAbortedError
from tdserve.base.failpoints import reach
from tdserve.data import values as stored_values
from tdserve.data.mapped_stores import MappedStore
from tdserve.data.read_plans import plan_read
from tdserve.data.rows_source import make_rows_source
from tdserve.data.values import measure_rows
from tdserve.messages.content import (
    STATUS_BYTES,
    ReadStatus,
    check_inline,
    decode_paths,
    make_rows_layout,
    make_status_column,
    read_layout,
    select_keys,
    select_spec,
    write_layout,
    write_messages,
)
from tdserve.messages.layout import MAX_MESSAGE_BYTES, Layout
from tdserve.messages.row_numbers import compute_max_rows, decode_repeats, decode_rows, spread
from tdserve.messages.selection.selection import from_message
from tdserve.messages.selection.torch_selection import to_torch_index
from tdserve.rules.replay.allocation.shared_numbers import FoundRows
from tdserve.store.disk.held_folder import HeldFolder
from tdserve.store.exchange.staging import Staging
from tdserve.store.weights.version_ends import VersionEnd
from tdserve.store.weights.version_marks import is_of_another
from tdserve.store.weights.versions import VersionFile
from tdserve.structure.tensors.torch_types import to_indexable, to_torch
from tdserve.structure.trees.dtypes import NAMES
from tdserve.structure.trees.tree import Path, Spec
from tdserve.structure.trees.version_subset import convert_floats, decode_numbers, select_leaves
from tdserve.transport.sources_sinks import (
    FlatBuffer,
    IndexedSource,
    LeafBuffers,
    RowBuffers,
    Sink,
    Source,
    TrailingColumns,
)
from tdserve.transport.stream import unpack
from tdserve.v1 import content_pb2, worker_pb2
from tdserve.worker.entry_orders import change_entries, is_small_change, list_entries, send_entries
from tdserve.worker.lane import Lane
from tdserve.worker.transfers import is_sent_at_once, receive_write, send_read, spool_values


def receive_version(lane: Lane, order: worker_pb2.Order) -> worker_pb2.Worked:
    """Fills a version's file and seals it; readers see it only after control has published it.

    Raises:
        CapacityError: The disk is full; no file remains.
    """
    wanted = order.receive_version
    spec = lane.context.stores.get_spec(wanted.version.fingerprint)
    file = VersionFile.create(wanted.version.path, spec, recycles=wanted.version.recycles or None)
    layout = write_layout(spec, is_packed=True)
    worked = receive_write(lane, order, wanted.content, layout, VersionEnd(file.content, spec, spec, layout))
    if wanted.content.values:
        file.write_values(wanted.content.values)
    file.seal()
    return worked


def send_version(lane: Lane, order: worker_pb2.Order) -> worker_pb2.Worked:
    """Sends a version's leaves in place, or converted; control keeps the file from being recycled meanwhile."""
    wanted = order.send_version
    spec = lane.context.stores.get_spec(wanted.version.fingerprint)
    sent = convert_floats(spec, NAMES.get(wanted.dtype, ""))
    is_converted = sent is not spec
    if wanted.HasField("leaves"):
        sent = select_leaves(sent, decode_numbers(wanted.leaves, spec))
    layout = read_layout(sent, is_packed=True)
    with _open_version(wanted.version, spec) as file:
        slots = layout.slots[: layout.num_leaves]
        values = file.read_values() or b"" if spec.values and not wanted.without_values else b""
        source: Source
        if is_converted:
            source = IndexedSource(
                layout, lambda slot: file.leaves[slots[slot].path].to(to_torch(slots[slot].dtype)), _select_all
            )
        else:
            source = VersionEnd(file.content, spec, sent, layout, TrailingColumns(layout, _select_all).get_column)
        return send_read(
            lane,
            order,
            layout,
            source,
            values=values,
            inline=wanted.inline,
            sends_values=wanted.sends_values,
            fills_last_after_sends=False,  # a version's file does not change
        )


@contextmanager
def _open_version(wanted: worker_pb2.VersionRef, spec: Spec) -> Iterator[VersionFile]:
    """Opens a version's file. Raises TransferAbortedError if another store has the name of its store by now."""
    path = FilePath(wanted.path)
    held = HeldFolder(path.parent)  # what is found here is of one folder
    if is_of_another(held.path, uid=wanted.uid):
        raise TransferAbortedError(transfer=0, reason="the store of the version was deleted meanwhile")
    try:
        file = VersionFile.open(held.path / path.name, spec)
    except CorruptDataError as error:
        raise error.with_fields(path=wanted.path) from error
    with file:
        yield file


def _select_all() -> list[NDArray[np.int64]]:
    return [make_status_column(ReadStatus.WHOLE)]


MAX_QUICK_BYTES = 256 * 1024
"""Content that may be sent by the reading thread: 256 rows of a kilobyte take about 50 microseconds."""

MAX_VOID_BYTES = 1 << 30
"""Longest message that a client may wait for: the last one of a sample has the columns of up to ``MAX_SAMPLE_ROWS``."""

MAX_QUICK_VALUES_BYTES = 4 * 1024 * 1024
"""Values that may be stored by the reading thread: as many as one coalesced extend has; they take about half a
millisecond per megabyte."""

SETTLE_POLL_S = 0.0005
"""Pause between two reads of a generation that is odd: an apply takes about this long for a few megabytes."""


def send_rows(lane: Lane, order: worker_pb2.Order) -> worker_pb2.Worked:
    """Sends selected rows with their numbers and generations; torn rows are marked."""
    wanted = order.send_rows
    store = lane.context.stores.get(wanted.store)
    lane.context.stores.remember_readable(store)
    rows = decode_rows(wanted.rows)
    expected = decode_repeats(wanted.generations, len(rows))
    added = {column.name: column.content for column in wanted.columns}
    spec = select_keys(store.spec, decode_paths(wanted.keys))
    layout = make_rows_layout(spec, len(rows), tuple(added))
    elements = spread(rows, math.prod(store.spec.batch_size[1:]))
    with lane.context.values_budget.begin_read() as count:
        values = stored_values.read_values(store, [path for path, _ in spec.values], elements, count=count)
        if spec is store.spec:
            store.row_values_nbytes = len(values) // max(len(rows), 1)
        source, inline = make_rows_source(store, layout, FoundRows(rows, expected), added), wanted.inline
        return send_read(lane, order, layout, source, values=values, inline=inline, sends_values=wanted.sends_values)


def receive_rows(lane: Lane, order: worker_pb2.Order) -> worker_pb2.Worked:
    """Receives rows straight into their places, which control has reserved for this transfer."""
    wanted = order.receive_rows
    store = lane.context.stores.get(wanted.store)
    rows = decode_rows(wanted.rows)
    keys = decode_paths(wanted.keys)
    layout = write_layout(select_keys(store.spec.with_rows(len(rows)), keys))
    sink = RowBuffers(layout, store.get_tables(layout), rows)
    if wanted.HasField("put_values"):
        worked = _take_and_store(lane, order, store, layout, sink)
    else:
        with spool_values(wanted.content, wanted.spool) as values:
            worked = receive_write(lane, order, wanted.content, layout, sink, values=values)
    if keys:
        written = {slot.path for slot in layout.slots}
        for path in store.leaves.keys() - written:  # the previous row's content must not be readable there
            store.get_table(path)[rows] = 0
    worked.columns.extend(store.get_table(tuple(key.parts))[rows].tobytes() for key in wanted.columns)
    return worked


def _take_and_store(
    lane: Lane, order: worker_pb2.Order, store: MappedStore, layout: Layout, sink: Sink
) -> worker_pb2.Worked:
    """Receives rows whose values come over the channel too, and stores the values; in the one worker that writes
    them."""
    wanted, context = order.receive_rows, lane.context
    write_messages(layout, wanted.content.values_nbytes, wanted.content.message_nbytes)  # before memory is allocated
    buffer = context.pool.take(wanted.content.values_nbytes)
    worked = receive_write(lane, order, wanted.content, layout, sink, values=FlatBuffer(buffer))
    order.is_accepted = False  # the channel is in step again: the values may fail on their own
    with context.values_lock:
        stored_values.put_values(store, wanted.put_values, before=buffer.numpy().tobytes())
    return worked


def read_columns(lane: Lane, order: worker_pb2.Order) -> worker_pb2.Worked:
    """Reports the bytes of some leaves of rows, for control's rules; for values, a ValueBlock with one column. Or their
    sizes, of each row one. Or, without leaves, only that no row is damaged."""
    wanted = order.read_columns
    store = lane.context.stores.get(wanted.store)
    rows = decode_rows(wanted.rows)
    if wanted.compares:
        store.compare_rows(rows, looks_again=True)
    columns = []
    with lane.context.values_budget.begin_read() as count:
        for path in decode_paths(wanted.keys):
            if wanted.measures:
                columns.append(measure_rows(store, path, rows).tobytes())
            elif path in store.leaves:
                table = store.get_table(path)
                count(len(rows) * table.shape[1] * table.itemsize)
                columns.append(table[rows].tobytes())
            else:
                columns.append(stored_values.read_values(store, [path], rows, count=count))
        return worker_pb2.Worked(columns=columns)


def send_selection(lane: Lane, order: worker_pb2.Order) -> worker_pb2.Worked:
    """Sends the content that an index expression selects, as of one moment, or reports that it could not."""
    wanted = order.send_selection
    context = lane.context
    store = context.stores.get(wanted.store)
    plan = plan_read(store, wanted)
    expected = tuple(wanted.expected_nbytes)
    if expected and expected != plan.layout.message_nbytes:
        raise RemoteProtocolError(
            expected=f"messages of {list(plan.layout.message_nbytes)} bytes", received=f"{expected}"
        )
    context.stores.remember_readable(store)
    before = _wait_until_settled(store, plan.watched, context.transfer_timeout_s)
    plan.compare_rows(store)
    source = plan.make_source(store, plan.make_trailer(store, before))
    with context.values_budget.begin_read() as count:
        values = stored_values.read_values(store, [path for path, _ in plan.spec.values], plan.elements, count=count)
        is_inline = not expected and sum(plan.layout.message_nbytes) <= wanted.inline_bytes
        order.is_accepted = order.is_accepted or bool(expected)  # until here nothing was sent, and it may be sent void
        return send_read(
            lane, order, plan.layout, source, values=values, inline=is_inline, sends_values=wanted.sends_values
        )


def receive_selection(lane: Lane, order: worker_pb2.Order) -> worker_pb2.Worked:
    """Receives content into a staging file, or straight into a store that is still invisible."""
    wanted = order.receive_selection
    store = lane.context.stores.get(wanted.store)
    layout = _make_layout(store, wanted.selection, decode_paths(wanted.keys))
    staged = FlatBuffer(_map_staging(wanted.staging, layout)) if wanted.staging else None
    with spool_values(wanted.content, wanted.spool) as values:
        return receive_write(
            lane, order, wanted.content, layout, staged or LeafBuffers(store.get_leaves(layout)), values=values
        )


def apply_staged(lane: Lane, order: worker_pb2.Order) -> worker_pb2.Worked:
    """Copies staged content to its place; control has marked the rows. It is safe to repeat."""
    wanted = order.apply_staged
    store = lane.context.stores.get(wanted.store)
    keys = decode_paths(wanted.keys)
    layout = _make_layout(store, wanted.selection, keys)
    if wanted.content.HasField("inline"):
        buffer = torch.empty(layout.nbytes, dtype=torch.uint8)
        check_inline(wanted.content, layout)
        unpack(wanted.content.inline, layout.messages, FlatBuffer(buffer))
    else:
        buffer = _map_staging(wanted.staging, layout)
    selection = from_message(wanted.selection)
    index = to_torch_index(selection, store.spec.batch_size) if selection.items else ()
    for slot in layout.slots:
        leaf = store.leaves[slot.path]
        content = buffer[slot.offset : slot.offset + slot.nbytes].view(leaf.dtype).view(slot.shape)
        if index:
            to_indexable(leaf)[index] = to_indexable(content)
        else:
            leaf.copy_(content)
        reach("overwrite.part-applied")
    return worker_pb2.Worked()


def discard(lane: Lane, order: worker_pb2.Order) -> worker_pb2.Worked:
    """Receives and drops the content of a request that was refused."""
    _check_announced(order, order.discard.message_nbytes, MAX_MESSAGE_BYTES)
    for nbytes in order.discard.message_nbytes:
        buffer = lane.context.pool.take(nbytes)
        lane.channel.recv(buffer, order.tag).wait(lane.context.transfer_timeout_s)
    return worker_pb2.Worked(nbytes_moved=sum(order.discard.message_nbytes))


def send_void(lane: Lane, order: worker_pb2.Order) -> worker_pb2.Worked:
    """Sends void messages to a client that already waits for them; the reason comes over its session."""
    sizes = order.send_void.message_nbytes
    context = lane.context
    _check_announced(order, sizes, MAX_VOID_BYTES, min_nbytes=STATUS_BYTES)
    for number, nbytes in enumerate(sizes, 1):
        buffer = torch.from_numpy(np.zeros(nbytes, np.uint8))  # unlike torch's zeros they take no memory until written
        if number == len(sizes):
            buffer.numpy()[-STATUS_BYTES:] = make_status_column(ReadStatus.FAILED).view(np.uint8)
        lane.channel.send(buffer, order.tag).wait(context.transfer_timeout_s)
    return worker_pb2.Worked(nbytes_moved=sum(sizes))


def put_values(lane: Lane, order: worker_pb2.Order) -> worker_pb2.Worked:
    """Stores non-tensor values; only in the one worker that writes them."""
    context = lane.context
    with context.values_lock:
        stored_values.put_values(context.stores.get(order.put_values.store), order.put_values)
    reach("values.stored")
    return worker_pb2.Worked()


def move_values(lane: Lane, order: worker_pb2.Order) -> worker_pb2.Worked:
    """Moves non-tensor values to other keys."""
    context = lane.context
    with context.values_lock:
        stored_values.move_values(context.stores.get(order.move_values.store), order.move_values)
    return worker_pb2.Worked()


def drop_values(lane: Lane, order: worker_pb2.Order) -> worker_pb2.Worked:
    """Deletes the non-tensor values of rows that have left their table; only in the one worker that writes values."""
    context, wanted = lane.context, order.drop_values
    with context.values_lock:
        return worker_pb2.Worked(
            num_dropped=stored_values.drop_values(context.stores.get(wanted.store), decode_rows(wanted.rows))
        )


def read_values(lane: Lane, order: worker_pb2.Order) -> worker_pb2.Worked:
    """Reports non-tensor values, for a client that cannot read them itself."""
    wanted = order.read_values
    store = lane.context.stores.get(wanted.store)
    with lane.context.values_budget.begin_read() as count:
        paths, elements = decode_paths(wanted.keys), decode_rows(wanted.elements)
        return worker_pb2.Worked(values=stored_values.read_values(store, paths, elements, count=count))


def _check_announced(order: worker_pb2.Order, sizes: Sequence[int], max_nbytes: int, *, min_nbytes: int = 0) -> None:
    """Checks sizes that a client has announced for a request that was refused before anything checked them.

    Raises:
        RemoteProtocolError: The content has no message of such a size. The channel closes: its ends do not agree.
    """
    if not all(nbytes <= max_nbytes for nbytes in sizes) or (sizes and sizes[-1] < min_nbytes):
        order.is_accepted = True
        received = f"announced ones of up to {max(sizes)} bytes"
        raise RemoteProtocolError(expected=f"messages of {min_nbytes} to {max_nbytes} bytes", received=received)


OPERATIONS: dict[str, Callable[[Lane, worker_pb2.Order], worker_pb2.Worked]] = {
    "send_rows": send_rows,
    "receive_rows": receive_rows,
    "send_selection": send_selection,
    "receive_selection": receive_selection,
    "apply_staged": apply_staged,
    "send_version": send_version,
    "receive_version": receive_version,
    "discard": discard,
    "put_values": put_values,
    "move_values": move_values,
    "drop_values": drop_values,
    "send_void": send_void,
    "read_columns": read_columns,
    "read_values": read_values,
    "change_entries": change_entries,
    "send_entries": send_entries,
    "list_entries": list_entries,
}


def is_quick(lane: Lane, order: worker_pb2.Order) -> bool:
    """Returns whether the reading thread may carry out an order: one that takes less time than to wake the lane's
    thread and never waits for the client, as a small sample of an open store. It may also store values of local clients
    while the worker has no clients of its own, which would wait behind that."""
    if order.HasField("change_entries"):
        return is_small_change(lane, order)
    if order.HasField("put_values"):
        return order.put_values.spool_nbytes <= MAX_QUICK_VALUES_BYTES and not lane.context.has_clients()
    if not order.HasField("send_rows") or order.send_rows.inline:
        return False
    store = lane.context.stores.find(order.send_rows.store.uid)
    if store is None or store.spec.values:
        return False
    num_rows = compute_max_rows(order.send_rows.rows)
    if num_rows * store.row_nbytes > MAX_QUICK_BYTES:
        return False
    # The reading thread also tells the client that its rows come: it must not wait until they are taken.
    spec = select_keys(store.spec, decode_paths(order.send_rows.keys))
    layout = make_rows_layout(spec, num_rows, tuple(column.name for column in order.send_rows.columns))
    return is_sent_at_once(layout.messages)


def perform(lane: Lane, order: worker_pb2.Order) -> worker_pb2.Worked:
    """Carries out any order."""
    kind = order.WhichOneof("body")
    operation = OPERATIONS.get(kind or "")
    if operation is None:
        raise RemoteProtocolError(expected="a known order", received=str(kind))
    return operation(lane, order)


def _map_staging(path: str, layout: Layout) -> torch.Tensor:
    folder, _, name = path.rpartition("/")
    return Staging(folder, name=name).reserve(layout.nbytes)


def _make_layout(store: MappedStore, selection: content_pb2.Selection, keys: list[Path]) -> Layout:
    return write_layout(select_spec(store.spec, from_message(selection), keys, store=store.name))


def _wait_until_settled(store: MappedStore, watched: slice | np.ndarray, timeout_s: float) -> np.ndarray:
    """Waits until no write is being applied, and returns the generations, none of which is odd."""
    end = time.monotonic() + timeout_s
    while True:
        before: np.ndarray = store.generations.values[watched].copy()
        if not (before & 1).any():
            return before
        if time.monotonic() > end:
            raise DeadlineExceededError(what="the end of a write to the rows that are read", timeout_s=timeout_s)
        time.sleep(SETTLE_POLL_S)
