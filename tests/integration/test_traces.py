"""Traces of calls from the client through control to the data worker, as an OTLP receiver gets them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread
from typing import Any, NamedTuple

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

import tdserve
from tdserve.base.errors import InvalidRequestError
from tests.errors import raises
from tests.integration.conftest import FreshServer
from tests.lent.sitecustomize import DOOR_VARIABLE
from tests.processes import REPOSITORY, START_TIMEOUT_S, wait_for

pytestmark = pytest.mark.integration


class Span(NamedTuple):
    """A span as the receiver got it; ids as hexadecimal digits, ``process`` as its resource names it."""

    process: str
    name: str
    trace: str
    id: str
    parent: str
    attributes: dict[str, Any]
    events: list[str]
    begun_ns: int
    ended_ns: int


class Receiver:
    """Receives spans by OTLP over HTTP. Threads: safe."""

    def __init__(self) -> None:
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                receiver.add(self.path, self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002 (the base's name)
                pass

        self._lock = Lock()
        self._spans: list[Span] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        Thread(target=self._server.serve_forever, daemon=True).start()

    def add(self, path: str, content: bytes) -> None:
        """Adds the spans of a request."""
        assert path == "/v1/traces"
        for resource in ExportTraceServiceRequest.FromString(content).resource_spans:
            named = _read_attributes(resource.resource.attributes)
            process = named.get("tdserve.process") or named["service.name"]
            with self._lock:
                self._spans += [
                    Span(
                        str(process),
                        each.name,
                        each.trace_id.hex(),
                        each.span_id.hex(),
                        each.parent_span_id.hex(),
                        _read_attributes(each.attributes),
                        [event.name for event in each.events],
                        each.start_time_unix_nano,
                        each.end_time_unix_nano,
                    )
                    for scope in resource.scope_spans
                    for each in scope.spans
                ]

    def list_spans(self, trace: str = "") -> list[Span]:
        """Lists the spans of a trace, or all."""
        with self._lock:
            return [span for span in self._spans if not trace or span.trace == trace]

    def close(self) -> None:
        """Stops to listen."""
        self._server.shutdown()
        self._server.server_close()


def _read_attributes(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    """A receiver of all spans of these tests."""
    made = Receiver()
    yield made
    made.close()


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory, receiver: Receiver) -> Iterator[list[tdserve.Server]]:
    """Two servers that export their spans soon."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        made = [tdserve.Server(tmp_path_factory.mktemp("root"), port=0, trace_endpoint=receiver.url) for _ in range(2)]
        for server in made:
            server.start()
    yield made
    for server in made:
        server.shutdown()


def run_scenario(
    scenario: str, address: str, transport: str, receiver: Receiver, *, store: str = "", **variables: str
) -> str:
    """Runs a scenario of ``tests.integration.traced_calls``; returns the id of its last trace.

    Args:
        store: A name that no other test has; by default that of scenario and transport.
    """
    store = store or f"{scenario}-{transport}"
    environ = {**os.environ, "TDSERVE_TRACE": "1", **variables}
    command = [sys.executable, "-m", "tests.lent.program", "tests.integration.traced_calls"]
    done = subprocess.run(
        [*command, scenario, address, transport, store, receiver.url],
        cwd=REPOSITORY,
        env=environ,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=2 * START_TIMEOUT_S,
    )
    return done.stdout.split()[-1]


def find_one(spans: list[Span], process: str, parent: str) -> Span:
    """Returns the one span of a process below another one."""
    (found,) = [span for span in spans if span.process == process and span.parent == parent]
    return found


def wait_for_spans(receiver: Receiver, trace: str, *processes: str) -> list[Span]:
    """Returns the spans of a trace once each of these processes has some."""

    def look() -> list[Span] | None:
        spans = receiver.list_spans(trace)
        return spans if {"application", *processes} <= {span.process for span in spans} else None

    return wait_for(look, f"spans of {processes}")


def find_call(spans: list[Span]) -> Span:
    """Returns the span of the application's one call."""
    (root,) = [span for span in spans if not span.parent]
    return find_one(spans, "application", root.id)


@pytest.mark.slow
def test_sample_when_traced_then_control_is_below_the_client_and_the_worker_below_control(
    traced: list[tdserve.Server], receiver: Receiver
) -> None:
    trace = run_scenario("sample", traced[0].address, "gloo", receiver)
    spans = wait_for_spans(receiver, trace, "control", "worker 0")
    call = find_call(spans)
    control = find_one(spans, "control", call.id)
    worker = find_one(spans, "worker 0", control.id)
    assert len(spans) == 4
    assert (call.name, control.name, worker.name) == ("tdserve.sample", "tdserve.sample", "tdserve.send_rows")
    for span in (call, control, worker):
        assert span.attributes["tdserve.store"] == "sample-gloo"
        assert span.attributes["tdserve.rows"] == 16
        assert span.attributes["tdserve.transport"] == "gloo"
        assert span.attributes["tdserve.request_id"] == call.attributes["tdserve.request_id"]
        assert "error.type" not in span.attributes
    assert worker.attributes["tdserve.bytes"] >= 16 * 4096
    assert call.begun_ns <= control.begun_ns <= worker.begun_ns <= worker.ended_ns <= control.ended_ns


def test_sample_on_shared_memory_when_traced_then_has_the_spans_of_client_and_control(
    traced: list[tdserve.Server], receiver: Receiver
) -> None:
    trace = run_scenario("sample", traced[0].address, "shm", receiver)
    spans = wait_for_spans(receiver, trace, "control")
    call = find_call(spans)
    assert find_one(spans, "control", call.id).name == call.name == "tdserve.sample"
    assert call.attributes["tdserve.transport"] == "shm"
    assert len(spans) == 3


@pytest.mark.slow
def test_draw_when_the_worker_answers_by_itself_then_its_span_is_below_that_of_the_client(
    traced: list[tdserve.Server], receiver: Receiver
) -> None:
    trace = run_scenario("draw", traced[0].address, "gloo", receiver)
    spans = wait_for_spans(receiver, trace, "worker 0")
    worker = find_one(spans, "worker 0", find_call(spans).id)
    assert worker.name == "tdserve.sample"
    assert worker.attributes["tdserve.store"] == "draw-gloo"
    assert worker.attributes["tdserve.rows"] == 1
    assert worker.attributes["tdserve.request_id"] == find_call(spans).attributes["tdserve.request_id"]


@pytest.mark.slow
def test_draw_on_shared_memory_when_no_request_is_sent_then_the_client_has_a_span(
    traced: list[tdserve.Server], receiver: Receiver
) -> None:
    trace = run_scenario("draw", traced[0].address, "shm", receiver)
    spans = wait_for_spans(receiver, trace)
    call = find_call(spans)
    assert call.name == "tdserve.sample"
    assert call.attributes == {"tdserve.store": "draw-shm", "tdserve.rows": 1, "tdserve.transport": "shm"}
    assert len(spans) == 2


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["gloo", "shm"])
def test_extend_when_it_returns_early_then_its_span_lasts_until_the_answer(
    traced: list[tdserve.Server], receiver: Receiver, transport: str
) -> None:
    trace = run_scenario("extend", traced[0].address, transport, receiver)
    spans = wait_for_spans(receiver, trace, "control")
    call = find_call(spans)
    control = find_one(spans, "control", call.id)
    assert call.name == control.name == "tdserve.extend"
    assert call.begun_ns <= control.begun_ns <= call.ended_ns
    assert call.attributes["tdserve.bytes"] == 16 * 4096


@pytest.mark.slow
def test_extend_when_the_worker_has_claimed_rows_then_its_span_is_below_that_of_the_client(
    traced: list[tdserve.Server], receiver: Receiver
) -> None:
    trace = run_scenario("claim", traced[0].address, "gloo", receiver)
    spans = wait_for_spans(receiver, trace, "worker 0")
    worker = find_one(spans, "worker 0", find_call(spans).id)
    assert worker.name == "tdserve.extend"
    assert worker.attributes["tdserve.store"] == "claim-gloo"


@pytest.mark.slow
def test_call_when_it_fails_then_the_spans_have_its_code(traced: list[tdserve.Server], receiver: Receiver) -> None:
    trace = run_scenario("read_missing", traced[0].address, "gloo", receiver)
    spans = wait_for_spans(receiver, trace, "control")
    call = find_call(spans)
    (control,) = [span for span in spans if span.process == "control" and span.name == call.name == "tdserve.latest"]
    assert control.attributes["error.type"] == call.attributes["error.type"] == "NOT_FOUND"
    assert control.parent == call.id


@pytest.mark.slow
def test_call_when_it_is_retried_then_each_attempt_is_below_its_one_span(
    receiver: Receiver, fresh_server: FreshServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    server = fresh_server(trace_endpoint=receiver.url)
    trace = run_scenario("retry", server.address, "gloo", receiver)
    wait_for(lambda: "tdserve.send_rows" in {span.name for span in receiver.list_spans(trace)}, "the sending of rows")
    spans = wait_for_spans(receiver, trace, "control", "worker 0")
    call = find_call(spans)
    attempts = sorted((span for span in spans if span.process == "control"), key=lambda span: span.begun_ns)
    assert call.events
    assert set(call.events) == {"retry"}
    assert {span.parent for span in attempts} == {call.id}
    assert any("error.type" in span.attributes for span in attempts[:-1])
    assert "error.type" not in attempts[-1].attributes
    assert find_one(spans, "worker 0", attempts[-1].id).name == "tdserve.send_rows"
    assert "error.type" not in call.attributes


@pytest.mark.slow
def test_coroutine_when_it_is_traced_then_is_below_the_span_of_its_task(
    traced: list[tdserve.Server], receiver: Receiver
) -> None:
    trace = run_scenario("await_sample", traced[0].address, "gloo", receiver)
    spans = wait_for_spans(receiver, trace, "control", "worker 0")
    assert find_one(spans, "control", find_call(spans).id).name == "tdserve.sample"


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["gloo", "shm"])
def test_sample_of_two_servers_when_traced_then_one_span_has_a_child_for_each(
    traced: list[tdserve.Server], receiver: Receiver, transport: str
) -> None:
    address = ",".join(server.address for server in traced)
    trace = run_scenario("sample_shards", address, transport, receiver)
    spans = wait_for_spans(receiver, trace, "control")
    call = find_call(spans)
    children = [span for span in spans if span.parent == call.id]
    assert call.name == "tdserve.sample"
    assert call.attributes == {"tdserve.store": "sample_shards-" + transport}
    drawn = [span.attributes.get("tdserve.rows", 0) for span in children if span.name == "tdserve.sample"]
    assert len(drawn) >= 2  # of those that ask how much each shard has, too
    servers = {span.attributes["server.address"] for span in children}
    assert servers == {server.address for server in traced}


@pytest.mark.slow
def test_call_when_the_application_does_not_sample_it_then_is_not_exported(
    traced: list[tdserve.Server], receiver: Receiver
) -> None:
    trace = run_scenario(
        "sample", traced[0].address, "gloo", receiver, store="unsampled", OTEL_TRACES_SAMPLER="always_off"
    )
    later = run_scenario("sample", traced[0].address, "gloo", receiver, store="sampled")
    wait_for_spans(receiver, later, "control", "worker 0")
    assert receiver.list_spans(trace) == []


@pytest.mark.slow
def test_server_when_it_has_no_receiver_then_calls_of_traced_clients_work(
    server: tdserve.Server, receiver: Receiver
) -> None:
    trace = run_scenario("draw", server.address, "gloo", receiver)
    assert {span.process for span in wait_for_spans(receiver, trace)} == {"application"}


@pytest.mark.slow
def test_server_when_its_receiver_is_gone_then_serves_and_ends_in_time(fresh_server: FreshServer) -> None:
    gone = Receiver()
    gone.close()
    served = fresh_server(trace_endpoint=gone.url)
    listening = Receiver()
    try:
        assert run_scenario("sample", served.address, "gloo", listening)
    finally:
        listening.close()
    with ThreadPoolExecutor(1) as threads:
        threads.submit(served.shutdown).result(START_TIMEOUT_S)


def test_server_when_the_endpoint_is_no_url_then_refused(tmp_path: Path) -> None:
    with raises(InvalidRequestError, argument="trace_endpoint"):
        tdserve.Server(tmp_path, trace_endpoint="127.0.0.1:4318").start()


CALLS = """
import sys, torch, tdserve
from tensordict import TensorDict
row = TensorDict({"x": torch.zeros(4)}, [])
for transport in ("gloo", "shm"):
    with tdserve.connect(sys.argv[1], transport=transport) as client:
        table = client.create_replay(transport, like=row, capacity=100)
        table.extend(row.expand(8))
        table.sample(4)
for package in ("tdserve.client.client", "opentelemetry"):
    print(sum(name.startswith(package) for name in sys.modules))
"""


@pytest.mark.full
def test_opentelemetry_when_tracing_is_off_then_is_imported_by_no_process(tmp_path: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if name != DOOR_VARIABLE}
    environ |= {"PYTHONPATH": str(REPOSITORY), "PYTHONPROFILEIMPORTTIME": "1"}  # of all processes of the server
    serve = [sys.executable, "-m", "tdserve", "serve", str(tmp_path / "root"), "--port", "0"]
    with open(tmp_path / "imports", "wb") as imports:
        serving = subprocess.Popen(serve, env=environ, stdout=subprocess.PIPE, stderr=imports, text=True)
    try:
        assert serving.stdout is not None
        address = serving.stdout.readline().split()[-1]
        done = subprocess.run(
            [sys.executable, "-c", CALLS, address],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=2 * START_TIMEOUT_S,
        )
    finally:
        serving.terminate()
        serving.communicate(timeout=START_TIMEOUT_S)
    lines = (tmp_path / "imports").read_text().splitlines()
    imported = {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}
    assert {"tdserve.server.dispatch.requests", "tdserve.worker.lane", "grpc"} <= imported
    assert [name for name in imported if name.startswith("opentelemetry")] == []
    assert done.stdout.split() == ["1", "0"]
