"""Tokens that are revoked, expire, change or reach limits while they are in use; and the log's lines about them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tests.errors import raises
from tests.integration.conftest import FreshServer
from tests.integration.token_files import TIMEOUT_S, TokenFile
from tests.processes import wait_for

pytestmark = pytest.mark.integration

ROW = TensorDict({"x": torch.zeros(1024)}, [])
BATCH = ROW.expand(16).clone()

BUSY_S = 4.0
"""Time that a test allows for the end of sessions, which is one second: the machine may be busy with other tests."""


@pytest.fixture
def tokens(tmp_path: Path) -> TokenFile:
    """A file without tokens."""
    return TokenFile(tmp_path / "tokens.json")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Where the server logs."""
    return tmp_path / "log"


@pytest.fixture
def server(tokens: TokenFile, fresh_server: FreshServer, log: Path) -> tdserve.Server:
    """A server that uses it."""
    with log.open("ab") as file:
        own = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            return fresh_server(tokens_file=str(tokens.path))
        finally:
            os.dup2(own, 2)
            os.close(own)


@pytest.fixture
def operator(tokens: TokenFile, server: tdserve.Server) -> Iterator[tdserve.Client]:
    """A client that may do everything, and has made a table."""
    token = tokens.add("operator", "admin")
    with connect(server, token) as client:
        client.create_replay("table", ROW, 10_000).extend(BATCH)
        yield client


def connect(
    server: tdserve.Server, token: str, transport: Any = "gloo", timeout_s: float = TIMEOUT_S
) -> tdserve.Client:
    """Opens a client once the server has read the file with the token."""

    def attempt() -> tdserve.Client | None:
        try:
            return server.client(token=token, transport=transport, timeout_s=timeout_s)
        except tdserve.UnauthenticatedError:
            return None

    return wait_for(attempt, "a session with the new token")


class Load:
    """Makes one call again and again in a thread, until it fails.

    Attributes:
        num_calls: Calls that have succeeded.
        error: The error that ended it.
        ended_s: When it ended.
    """

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call
        self.num_calls = 0
        self.error: Exception | None = None
        self.ended_s = 0.0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while True:
                self._call()
                self.num_calls += 1
        except Exception as error:  # noqa: BLE001 (the test looks at it)
            self.error, self.ended_s = error, time.monotonic()

    def wait_ended(self) -> Exception:
        """Waits for the error."""
        self._thread.join(TIMEOUT_S)
        assert self.error is not None
        return self.error


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["gloo", "shm", "grpc"])
def test_token_when_revoked_under_load_then_each_call_ends_with_the_reason_and_others_go_on(
    tokens: TokenFile, server: tdserve.Server, operator: tdserve.Client, transport: str
) -> None:
    token = tokens.add("member", "write")
    with connect(server, token, transport) as writer, connect(server, token, transport) as reader:
        table, read = writer.replay("table"), reader.replay("table")
        calls: list[Callable[[], object]] = [
            lambda: table.extend(BATCH),
            lambda: read.sample(32),
            lambda: reader.latest("never-published", timeout_s=TIMEOUT_S),
            writer.stores,
        ]
        loads = [Load(call) for call in calls]
        other = Load(lambda: operator.replay("table").extend(BATCH))
        wait_for(lambda: all(load.num_calls > 20 for load in (loads[0], loads[1], loads[3])), "calls under way")
        tokens.remove("member")
        revoked_s = time.monotonic()
        errors = [load.wait_ended() for load in loads]
        assert [type(error) for error in errors] == [tdserve.UnauthenticatedError] * len(loads), errors
        assert {str(error.fields["reason"]) for error in errors if isinstance(error, tdserve.TDServeError)} == {
            "it was revoked"
        }
        took_s = max(load.ended_s for load in loads) - revoked_s
        assert took_s < BUSY_S
        wait_for(lambda: len(operator.stats()["sessions"]) == 1, "the end of the sessions at the server")
        with pytest.raises(tdserve.UnauthenticatedError):
            table.extend(BATCH)
        num_calls = other.num_calls
        wait_for(lambda: other.num_calls > num_calls + 10, "calls with another token")
        assert other.error is None
        inserts = operator.replay("table").info()["inserts"]
        assert inserts >= 16 * (1 + loads[0].num_calls + num_calls)  # every acknowledged write is there
        operator.close()
        other.wait_ended()


@pytest.mark.full
def test_token_when_its_writer_had_claimed_rows_then_they_are_taken_back(
    tokens: TokenFile, server: tdserve.Server, operator: tdserve.Client
) -> None:
    token = tokens.add("member", "write")
    with connect(server, token, "shm") as client:
        table = client.replay("table")
        for _ in range(200):
            table.extend(BATCH)
        tokens.remove("member")

        def is_refused() -> bool:
            try:
                table.extend(BATCH)
            except tdserve.UnauthenticatedError:
                return True
            return False

        wait_for(is_refused, "the end of the session")
        wait_for(lambda: operator.replay("table").info()["reserved_rows"] == 0, "the end of the claim")
        for _ in range(1000):  # the whole ring: no row is held back
            operator.replay("table").extend(BATCH)


@pytest.mark.full
def test_token_when_it_expires_then_its_sessions_end_at_that_moment(
    tokens: TokenFile, server: tdserve.Server, operator: tdserve.Client
) -> None:
    end = datetime.now(timezone.utc) + timedelta(seconds=4)
    token = tokens.add("short", "read", expires=end.isoformat())
    with connect(server, token) as client:
        load = Load(lambda: client.replay("table").sample(4))
        error = load.wait_ended()
        assert isinstance(error, tdserve.UnauthenticatedError)
        late_s = time.time() - end.timestamp()
        assert -0.1 < late_s < BUSY_S
        with pytest.raises(tdserve.UnauthenticatedError, match="it has expired"):
            server.client(token=token)


@pytest.mark.slow
def test_token_when_rotated_then_the_old_one_ends_once_it_is_removed(
    tokens: TokenFile, server: tdserve.Server, operator: tdserve.Client
) -> None:
    with connect(server, tokens.add("member-1", "write")) as old:
        old.replay("table").extend(BATCH)
        with connect(server, tokens.add("member-2", "write")) as new:
            old.replay("table").extend(BATCH)
            new.replay("table").extend(BATCH)
            tokens.remove("member-1")
            wait_for(lambda: len(operator.stats()["sessions"]) == 2, "the end of the old session")
            new.replay("table").extend(BATCH)
            with pytest.raises(tdserve.UnauthenticatedError):
                old.replay("table").extend(BATCH)


@pytest.mark.slow
def test_token_when_its_entry_changes_then_the_client_goes_on_with_what_it_grants_now(
    tokens: TokenFile, server: tdserve.Server, operator: tdserve.Client
) -> None:
    with connect(server, tokens.add("member", "read")) as client:
        table = client.replay("table")
        with pytest.raises(tdserve.PermissionDeniedError):
            table.extend(BATCH)
        tokens.change("member", role="write")

        def can_write() -> bool:
            try:
                table.extend(BATCH)
            except tdserve.PermissionDeniedError:
                return False
            return True

        wait_for(can_write, "the new role")
        tokens.change("member", stores=["other*"])
        wait_for(lambda: not client.stores(), "the new patterns")
        with pytest.raises(tdserve.PermissionDeniedError):
            table.sample(1)


@pytest.mark.slow
@pytest.mark.parametrize("content", [b"{", b"", b"\xff\xfe", b'{"tokens": [{"name": "operator"}]}', None])
def test_file_when_it_becomes_invalid_then_earlier_tokens_stay_and_one_line_is_logged(
    tokens: TokenFile,
    server: tdserve.Server,
    operator: tdserve.Client,
    content: bytes | None,
    log: Path,
) -> None:
    def list_errors() -> list[str]:
        return [line for line in log.read_text().splitlines() if " ERROR " in line]

    tokens.path.unlink() if content is None else tokens.path.write_bytes(content)
    wait_for(lambda: list_errors() or None, "a line about the file")
    operator.replay("table").extend(BATCH)
    with connect(server, tokens_of(operator)) as another:
        another.stores()
    tokens.restore()
    token = tokens.add("member", "read")
    with connect(server, token) as member:
        member.stores()
    (line,) = list_errors()
    assert "tokens.json was changed, and its earlier tokens stay valid" in line


def tokens_of(client: tdserve.Client) -> str:
    """Returns the token of a client."""
    token = client.catalog.token
    assert token is not None
    return token


@pytest.mark.parametrize("content", ["{", '{"tokens": [{}]}', None])
def test_server_when_its_file_is_invalid_then_does_not_start(
    content: str | None, tmp_path: Path, fresh_server: FreshServer
) -> None:
    path = tmp_path / "tokens"
    if content is not None:
        path.write_text(content)
    with raises(tdserve.InvalidRequestError, argument="tokens_file"):
        fresh_server(tokens_file=str(path))


def is_revoked(server: tdserve.Server, token: str) -> bool:
    try:
        server.client(token=token).close()
    except tdserve.UnauthenticatedError as error:
        return "it was revoked" in str(error)
    return False


@pytest.mark.slow
def test_file_when_it_has_no_tokens_at_the_start_or_later_then_the_log_warns(
    tokens: TokenFile, server: tdserve.Server, log: Path
) -> None:
    line = f"{tokens.path.name} has no tokens: no client can connect"
    assert log.read_text().count(line) == 1
    connect(server, tokens.add("member", "read")).close()
    tokens.remove("member")
    wait_for(lambda: log.read_text().count(line) == 2 or None, "the second warning")


@pytest.mark.slow
def test_refusals_when_logged_then_with_entry_role_call_store_and_peer_and_no_secret(
    tokens: TokenFile, server: tdserve.Server, operator: tdserve.Client, log: Path
) -> None:
    token = tokens.add("member", "read", stores=["t*"])
    with connect(server, token) as client:
        table = client.replay("table")
        for _ in range(50):
            with pytest.raises(tdserve.PermissionDeniedError):
                table.extend(BATCH)
        with pytest.raises(tdserve.PermissionDeniedError):
            client.describe("hidden")
    with pytest.raises(tdserve.UnauthenticatedError, match="use one of --token-file/--tokens"):
        server.client(token=f"{token}x")
    tokens.remove("member")
    wait_for(lambda: is_revoked(server, token), "the revocation")
    with pytest.raises(tdserve.UnauthenticatedError, match="it was revoked"):  # what ended may have been a session
        server.client(token=token)
    operator.close()
    server.shutdown()
    logged = log.read_text()
    lines = [line for line in logged.splitlines() if "refused a call from ipv4:127.0.0.1:" in line]
    for part in (
        "role read, call 'extend', store 'table'",
        "role read, call 'describe_store', store 'hidden'",
        "missing or wrong (token 'member', role read, call 'session')",
        "it was revoked (token 'member', role read, call 'session')",
    ):
        assert sum(part in line and "'member'" in line for line in lines) == 1, (part, lines)
    for held in (token, tokens_of(operator)):
        assert held not in logged
        assert held.partition(".")[2][:8] not in logged


@pytest.mark.slow
def test_plain_token_when_there_is_a_file_of_tokens_too_then_it_grants_everything(
    tokens: TokenFile, fresh_server: FreshServer, tmp_path: Path
) -> None:
    (tmp_path / "plain").write_text("plain\n")
    server = fresh_server(tokens_file=str(tokens.path), token_file=str(tmp_path / "plain"))
    with server.client(token="plain") as client:
        client.init_remote(BATCH, "td")
        assert client.stats()["root"]
        with connect(server, tokens.add("member", "read")) as member, pytest.raises(tdserve.PermissionDeniedError):
            member.delete("td")
        client.delete("td")


@pytest.mark.slow
def test_sessions_when_their_limit_is_reached_then_another_is_refused_until_one_ends(
    tokens: TokenFile, server: tdserve.Server, operator: tdserve.Client
) -> None:
    token = tokens.add("member", "read", limits={"sessions": 2})
    first = connect(server, token)
    with connect(server, token):
        with pytest.raises(tdserve.ServerBusyError, match="another session of token 'member'"):
            server.client(token=token, transport="gloo", timeout_s=0.5).replay("table").sample(1)
        first.close()
        with connect(server, token) as third:
            third.replay("table").sample(1)
    operator.replay("table").sample(1)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["gloo", "shm"])
def test_rate_when_calls_come_faster_then_they_are_made_to_wait(
    tokens: TokenFile, server: tdserve.Server, operator: tdserve.Client, transport: str
) -> None:
    rate, num_calls = 50, 150
    with connect(server, tokens.add("member", "write", limits={"rate": rate}), transport) as client:
        table = client.replay("table")
        begun_s = time.monotonic()
        for _ in range(num_calls):
            table.extend(BATCH)
        assert time.monotonic() - begun_s > (num_calls - rate) / rate * 0.9
    assert operator.replay("table").info()["inserts"] == 16 * (1 + num_calls)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["gloo", "shm", "grpc"])
def test_rate_when_stores_are_listed_and_opened_faster_then_these_calls_wait_until_their_timeout(
    tokens: TokenFile, server: tdserve.Server, operator: tdserve.Client, transport: str
) -> None:
    rate, num_calls = 10, 15
    with connect(server, tokens.add("member", "read", limits={"rate": rate}), transport) as client:
        begun_s = time.monotonic()
        for _ in range(num_calls):
            assert "table" in client.stores()
            assert client["table"].name == "table"
        assert time.monotonic() - begun_s > (2 * num_calls - rate) / rate * 0.9
        client.timeout_s = 0.0
        with pytest.raises(tdserve.ServerBusyError, match="requests per second of token 'member'"):
            [client.stores() for _ in range(2 * rate)]


@pytest.mark.slow
def test_requests_when_their_limit_is_reached_then_others_are_refused_until_one_ends(
    tokens: TokenFile, server: tdserve.Server, operator: tdserve.Client
) -> None:
    with connect(server, tokens.add("member", "read", limits={"requests": 2})) as client:
        table = client.replay("table")
        waiting = [Load(lambda: client.latest("never-published", timeout_s=TIMEOUT_S)) for _ in range(2)]
        wait_for(lambda: operator.stats()["sessions"], "sessions")

        def is_refused() -> bool:
            try:
                table.sample(1, timeout_s=0.2)
            except (tdserve.ServerBusyError, tdserve.DeadlineExceededError) as error:  # the machine may be busy, too
                return "requests under way of token 'member'" in str(error)
            return False

        wait_for(is_refused, "a refused call")
        operator.publish("never-published", ROW)
        wait_for(lambda: all(load.num_calls for load in waiting), "the end of the waiting calls")
    for load in waiting:
        load.wait_ended()
