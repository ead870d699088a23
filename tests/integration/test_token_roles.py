"""Tokens with roles: each role, over each way by which a request can reach a server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.client.session.session import Session
from tdserve.structure.captures.capture import capture
from tdserve.v1 import control_pb2
from tests.contents import content_of
from tests.integration.token_files import TIMEOUT_S, TokenFile, open_wire
from tests.processes import wait_for

pytestmark = pytest.mark.integration

ROW = TensorDict({"x": torch.zeros(4)}, [])
BATCH = ROW.expand(8).clone()
CAPACITY = 64
ROLES = ("read", "write", "admin")
TRANSPORTS = ("gloo", "shm", "grpc")


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> TokenFile:
    """The file of the server's tokens: one of each role for some stores, and one for everything."""
    return TokenFile(tmp_path_factory.mktemp("tokens") / "tokens.json")


@pytest.fixture(scope="module")
def held(tokens: TokenFile) -> dict[str, str]:
    """The tokens by role; "all" grants everything."""
    found = {role: tokens.add(f"team-{role}", role, stores=["open-*"]) for role in ROLES}
    return {**found, "all": tokens.add("operator", "admin")}


@pytest.fixture(scope="module")
def server(
    tokens: TokenFile, held: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tdserve.Server]:
    """A server with these tokens."""
    root = tmp_path_factory.mktemp("roles") / "root"
    with tdserve.Server(root, tokens_file=str(tokens.path), adoptable=(str(root.parent),)) as started:
        yield started


@pytest.fixture(scope="module")
def operator(server: tdserve.Server, held: dict[str, str]) -> Iterator[tdserve.Client]:
    """A client that may do everything, and has made a store of each kind."""
    with server.client(token=held["all"], transport="gloo", timeout_s=TIMEOUT_S) as client:
        for prefix in ("open", "hidden"):
            client.init_remote(BATCH, f"{prefix}-td")
            sampler = tdserve.Prioritized()
            client.create_replay(f"{prefix}-table", ROW, CAPACITY, sampler=sampler).extend(BATCH)
            client.create_replay(f"{prefix}-ring", ROW, CAPACITY).extend(BATCH)
            client.create_queue(f"{prefix}-queue", ROW, 10_000).extend(ROW.expand(100).clone())
            client.create_kv(f"{prefix}-kv")["key"] = ROW
            client.publish(f"{prefix}-weights", ROW)
        yield client


@pytest.fixture(params=[(role, transport) for role in ROLES for transport in TRANSPORTS], ids="-".join)
def member(
    request: pytest.FixtureRequest, server: tdserve.Server, held: dict[str, str], operator: tdserve.Client
) -> Iterator[tuple[str, tdserve.Client]]:
    """A role, and a client that has it, over each transport."""
    role, transport = request.param
    with server.client(token=held[role], transport=transport, timeout_s=TIMEOUT_S) as client:
        assert client.stats()["transport"] == transport
        yield role, client


def take_and_acknowledge(client: tdserve.Client) -> None:
    """Consumes a row of the queue."""
    with client.queue("open-queue").take(1):
        pass


_number = count()

READS: dict[str, Callable[[tdserve.Client], Any]] = {
    "list": lambda client: client.stores(),
    "describe": lambda client: client.describe("open-td"),
    "keys": lambda client: client.keys("open-td"),
    "read": lambda client: client["open-td"][2:4],
    "read all": lambda client: client.from_remote_init("open-td"),
    "read rows": lambda client: client.replay("open-table")[torch.arange(4)],
    "sample": lambda client: client.replay("open-table").sample(4),
    "plain sample": lambda client: client.replay("open-ring").sample(4),
    "get": lambda client: client.kv("open-kv")["key"],
    "latest": lambda client: client.latest("open-weights"),
}
WRITES: dict[str, Callable[[tdserve.Client], Any]] = {
    "write": lambda client: client["open-td"].set_at_("x", torch.ones(4), 1),
    "extend": lambda client: client.replay("open-table").extend(BATCH),
    "plain extend": lambda client: client.replay("open-ring").extend(BATCH),
    "priorities": lambda client: client.replay("open-table").update_priority(torch.arange(2), torch.ones(2)),
    "take": take_and_acknowledge,
    "put": lambda client: client.kv("open-kv").__setitem__("another", ROW),
    "publish": lambda client: client.publish("open-weights", ROW),
    "add a key": lambda client: client["open-td"].set(f"k{next(_number)}", torch.zeros(8)),
    "create": lambda client: client.create_replay(f"open-made-{next(_number)}", ROW, 10),
    "create with content": lambda client: client.init_remote(BATCH, f"open-made-{next(_number)}"),
    "clear": lambda client: client.create_replay("open-cleared", ROW, 10, exists_ok=True).clear(),
}
ADMINS: dict[str, Callable[[tdserve.Client], Any]] = {
    "delete": lambda client: client.delete("open-deleted"),
    "adopt": lambda client: client.adopt("/", "open-adopted"),
}


def find_denied(client: tdserve.Client, calls: dict[str, Callable[[tdserve.Client], Any]]) -> dict[str, str]:
    """Makes each call several times; returns the denied calls, with the role that they need."""
    denied = {}
    for name, call in calls.items():
        for _ in range(3):  # small requests change their way once it is open
            try:
                call(client)
            except tdserve.PermissionDeniedError as error:
                denied[name] = str(error.needed)
            except (tdserve.StoreNotFoundError, tdserve.InvalidRequestError, tdserve.NotSupportedError):
                assert calls is ADMINS  # it was granted, and there is nothing to do it to
            else:
                assert name not in denied
    return denied


def test_mapping_when_to_write_then_needs_a_role_that_may(member: tuple[str, tdserve.Client]) -> None:
    role, client = member
    if client.transport != "shm":
        pytest.skip("only a client on the server's machine maps a store")
    maps: dict[str, Callable[[tdserve.Client], Any]] = {
        "map": lambda client: client["open-td"].map(writable=True),
        "load": lambda client: client.load_memmap("open-td", mode="r+"),
    }
    assert find_denied(client, maps) == (dict.fromkeys(maps, "write") if role == "read" else {})


@pytest.mark.slow
def test_role_when_it_makes_every_kind_of_call_then_only_those_of_higher_roles_are_denied(
    member: tuple[str, tdserve.Client],
) -> None:
    role, client = member
    assert find_denied(client, READS) == {}
    assert find_denied(client, WRITES) == (dict.fromkeys(WRITES, "write") if role == "read" else {})
    assert find_denied(client, ADMINS) == ({} if role == "admin" else dict.fromkeys(ADMINS, "admin"))


def test_role_when_a_call_was_denied_then_nothing_was_changed_and_the_session_goes_on(
    server: tdserve.Server, operator: tdserve.Client, held: dict[str, str]
) -> None:
    large = ROW.expand(CAPACITY).clone() + 7
    for transport in TRANSPORTS:
        with server.client(token=held["read"], transport=transport, timeout_s=TIMEOUT_S) as client:
            session = client.stats()["sessions"]
            for name in ("open-table", "open-ring"):
                before = operator.replay(name)[:]
                with pytest.raises(tdserve.PermissionDeniedError):
                    client.replay(name).extend(large)
                assert (operator.replay(name)[:] == before).all()
            assert client["open-td"][0] is not None
            assert client.stats()["sessions"] == session


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hidden-td", "nowhere"])
def test_store_when_the_token_does_not_include_it_then_denied_whether_or_not_it_exists(
    member: tuple[str, tdserve.Client], name: str
) -> None:
    _, client = member
    assert [each for each in client.stores() if not each.startswith("open-")] == []
    calls: dict[str, Callable[[tdserve.Client], Any]] = {
        "describe": lambda client: client.describe(name),
        "contains": lambda client: name in client,
        "open": lambda client: client[name],
        "read": lambda client: client.from_remote_init(name),
        "latest": lambda client: client.latest(name),
        "create": lambda client: client.create_replay(name, ROW, 10),
        "write": lambda client: client.init_remote(BATCH, name),
        "publish": lambda client: client.publish(name, ROW),
        "delete": lambda client: client.delete(name),
        "follow": lambda client: client.create_replay("open-following", ROW, 10, policy=name),
    }
    assert find_denied(client, calls) == dict.fromkeys(calls, "")


def test_listing_when_pages_are_small_then_no_page_token_is_a_hidden_name(
    server: tdserve.Server, operator: tdserve.Client, held: dict[str, str]
) -> None:
    from tdserve.client.session.catalog.catalog_client import CatalogClient

    with CatalogClient(server.address, token=held["read"], timeout_s=TIMEOUT_S) as client:
        expected, listed, after = client.stores(), [], ""
        while True:
            page = client.call("ListStores", control_pb2.ListStoresRequest(page_size=1, page_token=after))
            listed += page.names
            after = page.next_page_token
            assert not after.startswith("hidden")
            if not after:
                break
    assert listed == expected == [name for name in operator.stores() if name.startswith("open-")]


def test_stats_when_asked_without_all_stores_then_only_what_is_of_the_token(
    server: tdserve.Server, operator: tdserve.Client, held: dict[str, str]
) -> None:
    with server.client(token=held["admin"], transport="gloo", timeout_s=TIMEOUT_S) as client:
        client["open-td"]
        found, whole = client.stats(), operator.stats()
        assert len(found["sessions"]) == found["num_sessions"] == 1
        assert found["num_stores"] == len(client.stores()) < whole["num_stores"]
        assert (found["workers"], found["transports"], found["root"]) == ([], {}, "")
        assert len(whole["sessions"]) >= 2
        assert whole["root"]


def ask_by_mail(session: Session, make: Callable[[], dict[str, Any]]) -> list[Any]:
    """Sends requests until one has gone by mail; returns all answers and errors."""
    found: list[Any] = []
    numbers = count(1)

    def ask() -> bool:
        number = next(numbers)
        pending = session.send(number, **make())
        try:
            found.append(pending.wait(TIMEOUT_S, "a request by hand"))
        except tdserve.TDServeError as error:
            found.append(error)
        finally:
            session.end_request(number)
        return bool(pending.is_mailed)

    wait_for(ask, "a request by mail")
    return found


@pytest.mark.slow
def test_read_when_the_worker_could_answer_it_then_it_passes_a_hidden_store_on_and_control_denies(
    server: tdserve.Server, operator: tdserve.Client, held: dict[str, str]
) -> None:
    for _ in range(20):  # from now on its worker answers such reads without control
        operator["hidden-td"][:2]
        operator.replay("hidden-ring").sample(2)
    fingerprints = {
        name: operator.catalog.get_fingerprint(name, operator.make_deadline(None))
        for name in ("hidden-td", "hidden-ring")
    }
    asks: list[Callable[[], dict[str, Any]]] = [
        lambda: {"read": control_pb2.ReadRequest(store="hidden-td", fingerprint=fingerprints["hidden-td"])},
        lambda: {
            "sample": control_pb2.SampleRequest(
                store="hidden-ring", num_rows=2, fingerprint=fingerprints["hidden-ring"], is_plain=True
            )
        },
        lambda: {"get": control_pb2.GetRequest(store="hidden-kv", keys=[b"key"])},
    ]
    for ask in asks:
        with open_wire(server, held["read"]) as session:
            for answer in ask_by_mail(session, ask):
                assert isinstance(answer, tdserve.PermissionDeniedError), answer


@pytest.mark.slow
def test_extend_when_the_worker_has_claimed_rows_then_a_reader_s_is_passed_on_and_denied(
    server: tdserve.Server, operator: tdserve.Client, held: dict[str, str]
) -> None:
    ring = operator.create_replay("open-claimed", ROW, 1 << 16)
    for _ in range(300):
        ring.extend(BATCH)
    before = ring.info()["inserts"]
    captured = capture(BATCH)
    fingerprint = capture(ROW).spec.prepend((1 << 16,)).fingerprint

    def extend() -> dict[str, Any]:
        content = content_of(captured, fingerprint=fingerprint, is_inline=True)
        asked = control_pb2.ExtendRequest(store="open-claimed", num_rows=8, content=content, timeout_s=5.0)
        asked.wished_claim = 64
        return {"extend": asked}

    with open_wire(server, held["read"]) as session:
        for answer in ask_by_mail(session, extend):
            assert isinstance(answer, tdserve.PermissionDeniedError), answer
    assert ring.info()["inserts"] == before
    with open_wire(server, held["write"]) as session:  # the same message of a writer is stored
        answers = ask_by_mail(session, extend)
        assert [answer for answer in answers if isinstance(answer, Exception)] == []
    assert ring.info()["inserts"] == before + 8 * len(answers)


def test_group_when_the_patterns_leave_out_its_name_then_refused(server: tdserve.Server, held: dict[str, str]) -> None:
    with server.client(token=held["write"], transport="gloo", timeout_s=TIMEOUT_S) as client:
        with client.group("open-ring", world_size=1) as group:
            assert group.rank == 0
        with pytest.raises(tdserve.PermissionDeniedError, match="no group 'hidden-ring'"):
            client.group("hidden-ring", world_size=1)
