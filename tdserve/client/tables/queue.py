"""The handle of a queue: every row is taken, and acknowledged, once."""

from __future__ import annotations

from tdserve.client.content.outer_modes import leave_modes_in_calls
from tdserve.client.tables.queue_calls import QueueCalls
from tdserve.client.tables.table_handle import TableHandle
from tdserve.v1 import control_pb2


@leave_modes_in_calls
class QueueHandle(QueueCalls, TableHandle):
    """A queue, or a stack: rows wait in order until they are taken; writers wait while it is full. Threads: safe.

    Rows that were taken are consumed when they are acknowledged, exactly once across all consumers. Rows of a consumer
    that raised, left or died before that return to the front.
    """

    _kind = control_pb2.STORE_KIND_QUEUE
