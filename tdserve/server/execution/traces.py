"""The traces of requests: spans of the control process, and those that its workers report, exported by OpenTelemetry.

Only requests whose client asks for it are traced. Without ``--trace-endpoint`` there is none of this, and OpenTelemetry
is not imported.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from threading import Thread
from typing import TYPE_CHECKING, Any, Protocol

from tdserve.base.config import ServerConfig
from tdserve.base.errors import InvalidRequestError
from tdserve.base.trace_parent import MAX_TRACESTATE_BYTES, TraceParent, parse_traceparent
from tdserve.messages.span_attributes import BYTES, ERROR_TYPE, SPAN_PREFIX, describe_request, name_request
from tdserve.v1 import control_pb2, worker_pb2

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.trace import SpanKind

PACKAGES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
"""What ``tdserve[trace]`` installs."""

TRACES_PATH = "/v1/traces"
"""Where a receiver of OTLP takes spans by HTTP, below its endpoint."""

FLUSH_S = 3.0
"""Time for the last spans at the end of the server; the receiver may be gone."""


@dataclass
class RequestSpan:
    """The span of one request in the control process, while it is under way.

    Attributes:
        parent: Span of the client's call.
        tracestate: As it came from the client.
        name: Name of the span.
        attributes: Attributes of the span.
        own: The span itself, the parent of the workers' spans.
        begun_ns: When it began, since the epoch.
    """

    parent: TraceParent
    tracestate: str
    name: str
    attributes: dict[str, Any]
    own: TraceParent = field(init=False)
    begun_ns: int = field(default_factory=time.time_ns)

    def __post_init__(self) -> None:
        self.own = self.parent.make_child()

    def make_context(self) -> control_pb2.TraceContext:
        """Returns what an order of this request carries."""
        return control_pb2.TraceContext(traceparent=str(self.own), tracestate=self.tracestate)


class TracedSession(Protocol):
    """The session of a request.

    Attributes:
        spans: Spans of its requests under way.
    """

    spans: dict[int, RequestSpan]

    @property
    def transport(self) -> str:
        """How its content moves."""

    def make_request_id(self, request: int) -> str:
        """Returns the id of a request in the log."""


class Traces:
    """Exports spans by OTLP over HTTP, in a thread of its own. What cannot be exported in time is dropped and logged.

    Everything but the endpoint comes from the standard variables ``OTEL_*``: headers, certificates, the name of the
    service, the size of batches.

    Args:
        endpoint: URL of the receiver, without ``/v1/traces``.
        server_id: Id of the server.

    Raises:
        InvalidRequestError: Its packages are missing. Nothing was started.
    """

    def __init__(self, endpoint: str, server_id: str) -> None:
        if missing := [package for package in PACKAGES if not _is_installed(package)]:
            reason = f"{missing[0]} is not installed: pip install 'tdserve[trace]'"
            raise InvalidRequestError(argument="trace_endpoint", reason=reason)
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        url = endpoint.rstrip("/").removesuffix(TRACES_PATH) + TRACES_PATH
        self._processor = BatchSpanProcessor(OTLPSpanExporter(url))
        self._server_id = server_id
        self._resources: dict[tuple[str, int], Resource] = {}
        self._open: dict[int, RequestSpan] = {}

    @classmethod
    def from_config(cls, config: ServerConfig, server_id: str) -> Traces | None:
        """Makes the traces of a server; None if it traces nothing."""
        return cls(config.trace_endpoint, server_id) if config.trace_endpoint else None

    def begin(self, session: TracedSession, message: control_pb2.ClientMessage, kind: str) -> RequestSpan | None:
        """Begins the span of a request, of which its orders are part; ``end`` must follow. None if its client does not
        trace it."""
        parent = parse_traceparent(message.trace.traceparent) if message.HasField("trace") else None
        if parent is None:
            return None
        state, request_id = message.trace.tracestate, session.make_request_id(message.request)
        attributes = describe_request(message, kind, transport=session.transport, request_id=request_id)
        state = state if len(state) <= MAX_TRACESTATE_BYTES else ""
        span = RequestSpan(parent, state, name_request(message, kind), attributes)
        self._open[span.own.span_id] = session.spans[message.request] = span
        return span

    def end(self, session: TracedSession, request: int, span: RequestSpan, code: str) -> None:
        """Ends the span of a request; ``code`` is that of its error, or "" for none."""
        from opentelemetry.trace import SpanKind

        del self._open[span.own.span_id]
        if session.spans.get(request) is span:  # else that is of a later attempt
            del session.spans[request]
        times_ns = span.begun_ns, time.time_ns()
        resource = self._find_resource("control", os.getpid())
        self._export(span, span.own, times_ns, resource, kind=SpanKind.SERVER, attributes=span.attributes, code=code)

    def add_worker_span(self, reported: worker_pb2.WorkerSpan, session: int, *, number: int, pid: int) -> None:
        """Exports a span of a data worker.

        Args:
            reported: As the worker has reported it, a part of a request under way or a request by itself.
            session: Session of the request.
            number, pid: Number and process id of the worker.
        """
        from opentelemetry.trace import SpanKind

        parent = parse_traceparent(reported.parent.traceparent)
        if parent is None:
            return
        attributes: dict[str, Any] = {BYTES: reported.nbytes} if reported.nbytes else {}
        if (request := self._open.get(parent.span_id)) is not None:
            attributes = {**request.attributes, **attributes}
        elif reported.store:
            rows = {"tdserve.rows": reported.num_rows} if reported.num_rows else {}
            request_id = f"{session}-{reported.request}"
            attributes |= {"tdserve.store": reported.store, "tdserve.request_id": request_id, **rows}
        span = RequestSpan(parent, reported.parent.tracestate, SPAN_PREFIX + reported.name, attributes)
        kind = SpanKind.SERVER if request is None else SpanKind.INTERNAL
        resource = self._find_resource(f"worker {number}", pid)
        times_ns = reported.begun_ns, reported.ended_ns
        self._export(span, span.own, times_ns, resource, kind=kind, attributes=attributes, code=reported.code)

    def close(self) -> None:
        """Exports what is left, for up to ``FLUSH_S``."""
        closing = Thread(target=self._processor.shutdown, name="tdserve-traces-end", daemon=True)
        closing.start()
        closing.join(FLUSH_S)

    def _export(
        self,
        span: RequestSpan,
        own: TraceParent,
        times_ns: tuple[int, int],
        resource: Resource,
        *,
        kind: SpanKind,
        attributes: Mapping[str, Any],
        code: str,
    ) -> None:
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags, TraceState

        state = TraceState.from_header([span.tracestate]) if span.tracestate else None
        sampled = TraceFlags(TraceFlags.SAMPLED)
        ended = ReadableSpan(
            span.name,
            context=SpanContext(own.trace_id, own.span_id, False, sampled, state),
            parent=SpanContext(span.parent.trace_id, span.parent.span_id, True, sampled, state),
            resource=resource,
            attributes={**attributes, ERROR_TYPE: code} if code else attributes,
            kind=kind,
            status=Status(StatusCode.ERROR, code) if code else Status(StatusCode.UNSET),
            start_time=times_ns[0],
            end_time=times_ns[1],
            instrumentation_scope=InstrumentationScope("tdserve"),
        )
        self._processor.on_end(ended)

    def _find_resource(self, process: str, pid: int) -> Resource:
        """Returns the description of a process of the server; the variables of OpenTelemetry may name the service."""
        found = self._resources.get((process, pid))
        if found is None:
            from opentelemetry.sdk.resources import Resource

            ours: dict[str, Any] = {
                "service.instance.id": self._server_id,
                "process.pid": pid,
                "tdserve.process": process,
            }
            found = Resource.create(ours)
            if str(found.attributes.get("service.name", "")).startswith("unknown_service"):
                found = found.merge(Resource({"service.name": "tdserve"}))
            self._resources[process, pid] = found
        return found


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # of a package above it
        return False
