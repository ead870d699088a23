"""What a data worker has done for traced requests; control exports it, so that no worker needs OpenTelemetry."""

from __future__ import annotations

import time

from tdserve.base.trace_parent import parse_traceparent
from tdserve.control.status import get_code
from tdserve.v1 import control_pb2, worker_pb2


def note_order(order: worker_pb2.Order, report: worker_pb2.Report, begun_ns: int) -> None:
    """Adds the span of an order that has ended to its report; ``begun_ns`` is when it began, since the epoch."""
    body = getattr(order, order.WhichOneof("body") or "", None)
    nbytes = report.done.nbytes_moved or len(report.done.inline) + sum(_get_content(body).message_nbytes)
    code = get_code(report.failure) if report.HasField("failure") else ""
    span = report.span
    span.name, span.nbytes, span.code = order.WhichOneof("body") or "", nbytes, code
    span.parent.CopyFrom(order.trace)
    span.begun_ns, span.ended_ns = begun_ns, time.time_ns()


def describe_mail(mail: bytes, answer: bytes, begun_ns: int) -> worker_pb2.WorkerSpan | None:
    """Returns the span of a request that the worker has answered by itself; None if it is not traced.

    Args:
        mail: A serialised ClientMessage.
        answer: A serialised ServerMessage; b"" if the answer was content over the channel.
        begun_ns: When the request arrived, since the epoch.
    """
    message = control_pb2.ClientMessage.FromString(mail)
    if parse_traceparent(message.trace.traceparent) is None:
        return None
    kind = message.WhichOneof("body") or ""
    asked, answered = getattr(message, kind), control_pb2.ServerMessage.FromString(answer)
    content = _get_content(asked)
    nbytes = content.nbytes or len(answered.done.inline) or sum(getattr(asked, "message_nbytes", ()))
    return worker_pb2.WorkerSpan(
        parent=message.trace,
        name=kind,
        begun_ns=begun_ns,
        ended_ns=time.time_ns(),
        nbytes=nbytes,
        code=get_code(answered.failure) if answered.HasField("failure") else "",
        store=asked.store,
        num_rows=getattr(asked, "num_rows", 0) * max(getattr(asked, "num_batches", 1), 1),
        request=message.request,
    )


def _get_content(body: object) -> control_pb2.Content:
    content: control_pb2.Content = getattr(body, "content", None) or control_pb2.Content()
    return content
