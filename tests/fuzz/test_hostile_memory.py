"""Memory of a server's processes under an authenticated client that tries to use it up: no more than its limit, and
what guide/guarantees.md adds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

import tdserve
from tdserve.rules.kv.keyed_settings import KeyedSettings
from tdserve.structure.captures.capture import capture
from tdserve.structure.trees import codec
from tdserve.v1 import control_pb2, spec_pb2
from tests.fuzz.hostile_session import HostileSession
from tests.processes import wait_for
from tests.roots import make_quick_root

pytestmark = pytest.mark.integration

MIB = 1 << 20
PART_BYTES = MIB // 2
"""Less than what the client's end of a session cuts into parts itself."""

LIMIT_BYTES = 64 * MIB
CONTROL_EXTRA_BYTES = 160 * MIB
"""Beside the limit: buffers of gRPC, messages that are just being parsed, and what the allocator keeps."""

WORKER_EXTRA_BYTES = 160 * MIB
"""Beside half of the limit: staging buffers."""

TEXT = "y" * 20_000
ANSWER_S = 30.0
VICTIM_S = 20.0

FEW_ROWS = {"items": [{"slice": {"stop": 7}}]}

Message = control_pb2.ClientMessage


@pytest.fixture(scope="module")
def server() -> Iterator[tdserve.Server]:
    """A server with a low limit."""
    with (
        make_quick_root() as root,
        tdserve.Server(root, port=0, memory_limit_bytes=LIMIT_BYTES, transfer_timeout_s=5.0) as started,
    ):
        yield started


@pytest.fixture(scope="module")
def client(server: tdserve.Server) -> Iterator[tdserve.Client]:
    """A client of good will, and the stores that are attacked."""
    with server.client(transport="gloo", timeout_s=60.0) as connected:
        rows = TensorDict({"x": torch.zeros(512, 4096, dtype=torch.uint8)}, [512])
        connected.init_remote(rows, "rows")
        connected.init_remote(rows.set("text", NonTensorStack(*[TEXT] * 512)), "texts")
        connected.create_replay("ring", rows[0].select("x"), 600).extend(rows.select("x"))
        keyed = connected.create_kv("keyed")
        for number in range(4):
            keyed.put([f"{'k' * 400}{number}-{each}" for each in range(1_000)], [0] * 1_000)
        yield connected


def read_anonymous(pid: int) -> int:
    """Returns the memory of a process that no file backs, its share of what it has in common with others."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss_Anon"))


@contextmanager
def bounded(server: tdserve.Server, client: tdserve.Client) -> Iterator[None]:
    """A block in which the processes of a server grow within their bounds, and which another client does not notice."""
    (worker,) = client.stats()["workers"]
    pids, ended = {"control": server.pid, "worker": int(worker["pid"])}, Event()
    before = {name: read_anonymous(pid) for name, pid in pids.items()}
    most = dict(before)

    def watch() -> None:
        while not ended.wait(0.02):
            for name, pid in pids.items():
                most[name] = max(most[name], read_anonymous(pid))

    watching = Thread(target=watch, name="test-memory")
    watching.start()
    try:
        yield
        client.replay("ring").sample(4, timeout_s=VICTIM_S)
    finally:
        ended.set()
        watching.join()
    grown = {name: most[name] - before[name] for name in pids}
    assert grown["control"] <= LIMIT_BYTES + CONTROL_EXTRA_BYTES, grown
    assert grown["worker"] <= LIMIT_BYTES // 2 + WORKER_EXTRA_BYTES, grown
    assert client.stats()["workers"][0]["num_restarts"] == worker["num_restarts"]


def send_all(session: HostileSession, *messages: Message) -> set[int]:
    """Sends requests; returns their numbers."""
    for number, message in enumerate(messages, 1):
        message.request = number
        session.send(message)
    return set(range(1, len(messages) + 1))


def copies(num: int, **body: Any) -> list[Message]:
    """Returns as many equal requests."""
    return [Message(**body) for _ in range(num)]


def announce_sizes() -> list[Message]:
    """Waits for, and announces, content of sizes that no message has."""
    lie = control_pb2.Content(message_nbytes=[1 << 31])
    reads = [Message(read={"store": "none", "message_nbytes": [1 << size]}) for size in (31, 40, 63)]
    return [*reads, Message(extend={"store": "none", "num_rows": 1, "content": lie})]


def make_large_spec() -> spec_pb2.Spec:
    """Returns a structure of many leaves."""
    spec = spec_pb2.Spec()
    for number in range(6_000):
        spec.root.entries.add(key=f"key{number}").tensor.dtype = spec_pb2.DTYPE_INT64
    return spec


def create_large_table() -> list[Message]:
    """Asks for a table whose rules would take all memory."""
    row = codec.encode(capture(TensorDict({"x": torch.zeros((), dtype=torch.uint8)}, [])).spec)
    return [Message(create_store={"name": "huge", "kind": 2, "spec": row, "capacity": 10**12})]


def describe_large_spec() -> list[Message]:
    """Asks for the description of a store of many leaves."""
    created = copies(3, create_store={"name": "wide", "kind": 1, "spec": make_large_spec()})
    return [*created, *copies(300, catalog={"describe_store": {"name": "wide"}})]


KEYED_FINGERPRINT = KeyedSettings().make_stored_spec(capture(TensorDict({}, [])).spec.fingerprint).fingerprint

FLOODS: dict[str, tuple[int, Callable[[], list[Message]]]] = {
    "sizes that are announced": (1, announce_sizes),
    "reads inside of messages": (2, lambda: copies(2_000, read={"store": "rows", "selection": FEW_ROWS})),
    "values": (4, lambda: copies(40, read={"store": "texts"})),
    "pages of keys": (2, lambda: copies(300, list={"store": "keyed", "fingerprint": KEYED_FINGERPRINT})),
    "many small fields": (2, lambda: copies(10, read={"store": "rows", "keys": [{} for _ in range(200_000)]})),
    "large samples": (2, lambda: copies(40, sample={"store": "ring", "num_rows": 1 << 20, "num_batches": 16})),
    "pages of names": (2, lambda: copies(5_000, catalog={"list_stores": {}})),
    "structures": (1, describe_large_spec),
    "a table of very many rows": (1, create_large_table),
}  # fmt: skip
"""By what is flooded: the number of sessions, and the requests of each."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=pytest.mark.full) if what == "pages of names" else what for what in FLOODS]
)
def test_requests_when_they_demand_much_then_no_process_grows_beyond_its_bound(
    server: tdserve.Server, client: tdserve.Client, what: str
) -> None:
    num_sessions, make = FLOODS[what]
    with bounded(server, client), ExitStack() as stack:
        sessions = [HostileSession(server.address) for _ in range(num_sessions)]
        for session in sessions:
            stack.callback(session.close)
        asked = [send_all(session, *make()) for session in sessions]
        for session, numbers in zip(sessions, asked, strict=True):
            answers = session.collect(numbers, ANSWER_S)
            assert {error.code for error in answers.values() if error is not None} <= {
                "RESOURCE_EXHAUSTED", "NOT_FOUND", "INVALID_ARGUMENT", "ABORTED", "UNAVAILABLE", "DEADLINE_EXCEEDED",
                "FAILED_PRECONDITION", "ALREADY_EXISTS",
            }  # fmt: skip


@pytest.mark.slow
def test_parts_when_their_messages_never_end_then_refused_and_the_rest_dropped(
    server: tdserve.Server, client: tdserve.Client
) -> None:
    part = control_pb2.MessagePart(content=bytes(PART_BYTES))
    with bounded(server, client), ExitStack() as stack:
        sessions = [HostileSession(server.address) for _ in range(6)]
        for session in sessions:
            stack.callback(session.close)
            for _ in range(100):
                session.send(Message(request=1, part=part))
        for session in sessions:
            (error,) = session.collect({1}, ANSWER_S).values()
            assert isinstance(error, (tdserve.ServerBusyError, tdserve.TooLargeError))
        session.send(Message(request=2, part=control_pb2.MessagePart(is_last=True)))
        session.send(Message(request=3, catalog={"describe_store": {"name": "rows"}}))
        assert session.collect({3}, ANSWER_S) == {3: None}


@pytest.mark.slow
def test_parts_when_each_has_another_inside_then_their_session_ends(
    server: tdserve.Server, client: tdserve.Client
) -> None:
    content = Message(request=1, part={"content": bytes(10 * MIB)}).SerializeToString()
    for _ in range(100):
        content = Message(request=1, part={"content": content, "is_last": True}).SerializeToString()
    with bounded(server, client), ExitStack() as stack:
        session = HostileSession(server.address)
        stack.callback(session.close)
        for start in range(0, len(content), PART_BYTES):
            stop = start + PART_BYTES
            part = control_pb2.MessagePart(content=content[start:stop], is_last=stop >= len(content))
            session.send(Message(request=1, part=part))
        wait_for(lambda: session.take_answer(1.0) and session.is_lost, "the end of the session", timeout_s=ANSWER_S)


@pytest.mark.slow
def test_notices_when_another_member_takes_none_then_they_are_not_kept(
    server: tdserve.Server, client: tdserve.Client
) -> None:
    entry = control_pb2.Rendezvous(key="x", value=bytes(MIB))
    join = {"name": "group", "world_size": 2, "backend": "gloo", "timeout_s": VICTIM_S}
    with bounded(server, client), ExitStack() as stack:
        first, second = HostileSession(server.address), HostileSession(server.address)
        for session in (first, second):
            stack.callback(session.close)
            session.send(Message(request=1, join_group=join))
        assert first.collect({1}, ANSWER_S) == second.collect({1}, ANSWER_S) == {1: None}
        for _ in range(200):
            first.send(Message(group_notice={"name": "group", "epoch": 1, "entry": entry}))
        first.send(Message(request=2, catalog={"list_stores": {}}))
        assert first.collect({2}, ANSWER_S) == {2: None}


@pytest.mark.slow
def test_entries_when_they_are_large_then_their_session_ends(server: tdserve.Server, client: tdserve.Client) -> None:
    with bounded(server, client), ExitStack() as stack:
        for _ in range(3):
            session = HostileSession(server.address)
            stack.callback(session.close)
            for number in range(500):
                session.send(Message(rendezvous={"key": str(number), "value": bytes(60_000)}))
            wait_for(lambda: session.take_answer(1.0) and session.is_lost, "the end of the session", timeout_s=ANSWER_S)  # noqa: B023
