"""Spans of a client's calls, for the tracer provider of the application; only with ``TDSERVE_TRACE=1``.

Without it, OpenTelemetry is not imported and a call costs a comparison more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from contextvars import copy_context
from functools import cache, partial, wraps
from importlib.util import find_spec
from threading import local
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from tdserve.base.config import is_client_traced
from tdserve.base.errors import InvalidRequestError, TDServeError
from tdserve.client.session.calls.call_deadline import leave_blocks
from tdserve.messages.span_attributes import BYTES, ERROR_TYPE, SPAN_PREFIX, describe_request, name_request
from tdserve.v1 import control_pb2

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span


_Result = TypeVar("_Result")
_Method = TypeVar("_Method", bound=Callable[..., Any])

_of_thread = local()


class RequestingSession(Protocol):
    """The session of a request.

    Attributes:
        address: Address of the server.
        welcome: The server's answer to Hello.
    """

    address: str
    welcome: control_pb2.Welcome

    @property
    def transport(self) -> str:
        """How content moves."""


class CallTraces:
    """Makes the spans of calls. Threads: safe.

    Raises:
        InvalidRequestError: OpenTelemetry is not installed.
    """

    def __init__(self) -> None:
        if find_spec("opentelemetry") is None:
            reason = "opentelemetry is not installed: pip install 'tdserve[trace]'"
            raise InvalidRequestError(argument="TDSERVE_TRACE", reason=reason)
        from opentelemetry import trace
        from opentelemetry.context import get_current
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._trace = trace
        self._tracer = trace.get_tracer("tdserve")
        self._get_context = get_current
        self._propagator = TraceContextTextMapPropagator()

    def get_context(self) -> Context:
        """Returns the application's current context, which has its current span."""
        return self._get_context()

    def start_span(self, name: str, parent: Context, attributes: Mapping[str, Any], begun_ns: int | None) -> Span:
        """Starts a span; by default it begins now."""
        client = self._trace.SpanKind.CLIENT
        return self._tracer.start_span(name, parent, kind=client, attributes=attributes, start_time=begun_ns)

    def make_message(self, span: Span) -> control_pb2.TraceContext | None:
        """Returns what a request carries to be part of a span; None if that is not recorded."""
        if not span.get_span_context().trace_flags.sampled:
            return None
        headers: dict[str, str] = {}
        self._propagator.inject(headers, self._trace.set_span_in_context(span))
        return control_pb2.TraceContext(traceparent=headers["traceparent"], tracestate=headers.get("tracestate", ""))

    def mark_failed(self, span: Span, code: str) -> None:
        """Notes the error with which a span ends."""
        span.set_attribute(ERROR_TYPE, code)
        span.set_status(self._trace.StatusCode.ERROR, code)

    def trace_request(
        self, message: control_pb2.ClientMessage, kind: str, session: RequestingSession
    ) -> TracedCall | None:
        """Makes a request that is about to be sent a part of the call that this thread makes; returns the call that
        ends with the request if this thread makes none.

        Args:
            kind: The field of the message.
            session: The session that sends it.
        """
        call = get_traced_call()
        if call is not None:
            call.join(message, kind, session)
            return None
        own = TracedCall(self)
        own.join(message, kind, session)
        return own

    def note_local_call(self, call: str, begun_s: float, attributes: Mapping[str, Any], code: str = "") -> None:
        """Makes the span of a call that was made without a request, and ends now; arguments as in
        ``ObservedCalls.count``."""
        begun_ns = time.time_ns() - int((time.perf_counter() - begun_s) * 1e9)
        span = self.start_span(SPAN_PREFIX + call, self.get_context(), attributes, begun_ns)
        if code:
            self.mark_failed(span, code)
        span.end()

    @contextmanager
    def gather_calls(self, call: str, store: str) -> Iterator[None]:
        """Runs a block whose calls, of whatever threads, are the children of one span: a call of several servers."""
        attributes = {"tdserve.store": store}
        span = self.start_span(SPAN_PREFIX + call, self.get_context(), attributes, None)
        with self._trace.use_span(span, end_on_exit=True, record_exception=False, set_status_on_exception=False):
            try:
                yield
            except BaseException as error:
                self.mark_failed(span, find_code(error))
                raise

    @contextmanager
    def trace_call(self) -> Iterator[None]:
        """Runs a block whose requests, as far as this thread sends them, are one call; it may be a part of one."""
        if get_traced_call() is not None:
            yield
            return
        call = TracedCall(self)
        try:
            with call.make_current():
                yield
        except BaseException as error:
            call.end(find_code(error))
            raise
        call.end()


class TracedCall:
    """One call of the application, over all its attempts: its span begins with its first request.

    Args:
        traces: Makes the span, below the application's current one.
    """

    def __init__(self, traces: CallTraces) -> None:
        self._traces = traces
        self._parent = traces.get_context()
        self._span: Span | None = None
        self._nbytes = 0

    def note_content(self, nbytes: int) -> None:
        """Notes the size of the content of a write that is about to be sent, or written in place."""
        self._nbytes = nbytes

    def join(self, message: control_pb2.ClientMessage, kind: str, session: RequestingSession) -> None:
        """Makes a request a part of the call; arguments as in ``CallTraces.trace_request``."""
        span = self._span
        if span is None:
            request_id = f"{session.welcome.session}-{message.request}"
            attributes = describe_request(message, kind, transport=session.transport, request_id=request_id)
            attributes |= {"server.address": session.address} | ({BYTES: self._nbytes} if self._nbytes else {})
            span = self._traces.start_span(name_request(message, kind), self._parent, attributes, None)
            self._span = span
        context = self._traces.make_message(span)
        if context is not None:
            message.trace.CopyFrom(context)

    def note_retry(self, error: TDServeError) -> None:
        """Adds the failure of an attempt that is followed by another."""
        if self._span is not None:
            self._span.add_event("retry", {ERROR_TYPE: error.code, "exception.message": str(error)[:500]})

    def end(self, code: str = "") -> None:
        """Ends the call; ``code`` is that of its error, "" for none."""
        span, self._span = self._span, None
        if span is not None:
            if code:
                self._traces.mark_failed(span, code)
            span.end()

    def end_with(self, future: Future[Any]) -> None:
        """Ends the call with a future that has ended."""
        error = future.exception()
        self.end("" if error is None else find_code(error))

    @contextmanager
    def make_current(self) -> Iterator[None]:
        """Runs a block whose requests, as far as this thread sends them, are part of the call."""
        before = get_traced_call()
        _of_thread.call = self
        try:
            yield
        finally:
            _of_thread.call = before


def get_traced_call() -> TracedCall | None:
    """Returns the traced call that this thread makes; None if it makes none."""
    found: TracedCall | None = getattr(_of_thread, "call", None)
    return found


@cache
def find_call_traces() -> CallTraces | None:
    """Returns what traces this process's calls; None if that was not requested.

    Raises:
        InvalidRequestError: OpenTelemetry is asked for, and not installed.
    """
    return CallTraces() if is_client_traced() else None


def carry_context(work: Callable[[], _Result]) -> Callable[[], _Result]:
    """Returns work for another thread, whose spans are below the current one of this thread. It is in no block of
    ``within``, with spans as without: what it has to end by is known to its call."""
    if find_call_traces() is None:
        return work
    context = copy_context()
    context.run(leave_blocks)
    return partial(context.run, work)


def gather_spans(method: _Method) -> _Method:
    """Makes a method of a handle whose requests to several servers are traced below one span, named like the method."""
    name = method.__name__.lstrip("_")

    @wraps(method)
    def call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        traces = find_call_traces()
        with nullcontext() if traces is None else traces.gather_calls(name, self.name):
            return method(self, *args, **kwargs)

    return cast("_Method", call)


def find_code(error: BaseException) -> str:
    """Returns the code of an error for a span."""
    return error.code if isinstance(error, TDServeError) else type(error).__name__


def note_retry(error: TDServeError) -> None:
    """Notes that the call of this thread is tried again after an error, if calls are traced."""
    if (call := get_traced_call()) is not None:
        call.note_retry(error)
