"""The orders about entries of keyed stores."""

from __future__ import annotations

from tdserve.data import stored_entries
from tdserve.data.stored_entries import encode_entries, find_entries
from tdserve.messages.content import ReadStatus, make_status_column, read_layout
from tdserve.rules.kv.entry_changes import make_missing_error
from tdserve.transport.sources_sinks import LeafBuffers, TrailingColumns
from tdserve.v1 import control_pb2, worker_pb2
from tdserve.worker.lane import Lane
from tdserve.worker.transfers import send_read

MAX_QUICK_BYTES = 32 * 1024
"""Records that the reading thread may store: a commit of this many takes about as long as to wake another thread."""


def change_entries(lane: Lane, order: worker_pb2.Order) -> worker_pb2.Worked:
    """Changes entries, together with the answer; only in the one worker that writes values."""
    wanted, context = order.change_entries, lane.context
    store = context.stores.get(wanted.store)
    with context.values_lock:
        answer = stored_entries.change_entries(store, wanted)
    if not wanted.mail_session:
        return worker_pb2.Worked(answer=answer)
    # It is committed: the client need not wait until control has recorded it too.
    message = control_pb2.ServerMessage(request=wanted.request, done=control_pb2.Done.FromString(answer))
    is_mailed = context.send_mail(wanted.mail_session, message.SerializeToString())
    return worker_pb2.Worked(answer=answer, is_mailed=is_mailed)


def send_entries(lane: Lane, order: worker_pb2.Order) -> worker_pb2.Worked:
    """Sends entries; refuses if a key is absent, unless only versions are asked for."""
    wanted = order.send_entries
    stores = lane.context.stores
    store = stores.get(wanted.store)
    stores.remember_readable(store)
    with lane.context.values_budget.begin_read() as count:
        found = find_entries(store, wanted.keys, count=count)
        if 0 in found.versions and not wanted.asks_versions:
            raise make_missing_error(store.name, wanted.keys[found.versions.index(0)])
        if wanted.only_checks:
            return worker_pb2.Worked()
        values = encode_entries(found, asks_versions=wanted.asks_versions)
        layout = read_layout(store.spec)
        source = LeafBuffers([], TrailingColumns(layout, lambda: [make_status_column(ReadStatus.WHOLE)]))
        return send_read(lane, order, layout, source, values=values, inline=True, sends_values=wanted.sends_values)


def list_entries(lane: Lane, order: worker_pb2.Order) -> worker_pb2.Worked:
    """Reports a page of keys."""
    wanted = order.list_entries
    store = lane.context.stores.get(wanted.store)
    return worker_pb2.Worked(answer=stored_entries.list_entries(store, wanted.request).SerializeToString())


def is_small_change(lane: Lane, order: worker_pb2.Order) -> bool:
    """Returns whether a change of entries takes no longer than to wake another thread."""
    wanted = order.change_entries
    is_small = not wanted.values.spool and len(wanted.values.values) + sum(map(len, wanted.keys)) <= MAX_QUICK_BYTES
    return is_small and not lane.context.values_lock.locked()
