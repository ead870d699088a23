"""A claim at the client's end; the server's end of its file is here, and its rows are those of a real table."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.base.deadline import Deadline
from tdserve.base.errors import ConnectError, StoreNotFoundError
from tdserve.client.local import local_claim
from tdserve.client.local.local_claim import LocalClaim
from tdserve.client.local.local_writes import fill_rows
from tdserve.client.session.session import Session
from tdserve.store.exchange import session_locks
from tdserve.store.rows.claim_file import FOLDER, ClaimFile
from tdserve.structure.captures.capture import Captured, capture
from tdserve.v1 import control_pb2
from tests.processes import wait_for

CAPACITY = 8
CLIENT = bytes(range(16))


def rows(number: int, num_rows: int) -> TensorDict:
    """Rows of this number."""
    return TensorDict({"a": torch.full((num_rows,), number), "b": torch.full((num_rows, 2), number)}, [num_rows])


def batch(number: int, num_rows: int = 3) -> Captured:
    """The same, taken apart."""
    return capture(rows(number, num_rows))


class Table:
    """A table of eight rows, and what the server would do with its claims."""

    def __init__(self, client: tdserve.Client, name: str) -> None:
        self.handle: Any = client.create_replay(name, rows(0, 1)[0], CAPACITY)
        self.session: Session = client.session(Deadline.after(20.0))
        assert self.session.local is not None
        self.local = self.session.local
        self.description = client.describe(name)
        self.stored = self.handle.spec.prepend((CAPACITY,))
        self.path = f"{self.description.path}/{FOLDER}/here"
        self.file = ClaimFile.create(self.local.root / self.path, CAPACITY)

    def claim(self, first_row: int = 0, num_rows: int = CAPACITY) -> LocalClaim:
        """What the client is let claim."""
        self.file.take(0, num_rows)
        said = control_pb2.Claim(first_row=first_row, uid=self.description.uid, path=self.path)
        return LocalClaim(self.local, self.handle.name, self.stored, said, client_id=CLIENT)

    def written(self) -> list[int]:
        """What the leaf ``b`` holds, a number per row; they must agree."""
        store = self.local.store(self.handle.name, self.description.uid, self.stored)
        leaf = store.leaves[("b",)]
        assert torch.equal(leaf[:, 0], store.leaves[("a",)])
        found: list[int] = leaf[:, 0].tolist()
        return found

    def generations(self) -> list[int]:
        """Returns the generations of the rows."""
        store = self.local.store(self.handle.name, self.description.uid, self.stored)
        found: list[int] = store.generations.values[:CAPACITY].tolist()
        return found


@pytest.fixture
def table(local_client: tdserve.Client, name: str) -> Table:
    return Table(local_client, name)


def test_extend_when_rows_may_be_claimed_then_odd_filled_and_on_record_round_the_ring(table: Table) -> None:
    claim = table.claim(first_row=4)
    found = [claim.extend(7, [batch(1)]), claim.extend(8, [batch(2)])]
    assert [None if each is None else each.tolist() for each in found] == [[4, 5, 6], [7, 0, 1]]
    assert table.written() == [2, 2, 0, 0, 1, 1, 1, 2]
    assert table.generations() == [1, 1, 0, 0, 1, 1, 1, 1], "the server makes them live"
    assert (table.file.num_claimed, table.file.num_written) == (6, 2)
    assert [table.file.record(0), table.file.record(1)] == [(CLIENT, 7, 3), (CLIENT, 8, 3)]


def test_extend_when_the_server_has_to_catch_up_first_then_over_and_exhausted(table: Table) -> None:
    claim = table.claim(num_rows=4)
    assert claim.extend(1, [batch(1)]) is not None
    assert claim.extend(2, [batch(1)]) is None
    assert claim.is_exhausted
    table.file.take(1, 100)
    assert claim.extend(3, [batch(1)]) is None, "the server was asked for rows instead, which ends the claim there"


def test_extend_when_the_server_has_ended_the_claim_then_over_and_nothing_claimed(table: Table) -> None:
    claim = table.claim()
    table.file.end()
    assert claim.extend(1, [batch(1)]) is None
    assert not claim.is_exhausted
    assert table.file.num_claimed == 0


def test_extend_when_the_claim_ends_while_it_claims_then_nothing_is_filled_and_the_server_is_informed(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim, fence = table.claim(), ClaimFile.fence
    said: list[control_pb2.ClientMessage] = []

    def end_meanwhile(file: ClaimFile) -> None:
        if file is not table.file:
            table.file.end()
        fence(file)

    monkeypatch.setattr(table.local, "send", said.append)
    monkeypatch.setattr(ClaimFile, "fence", end_meanwhile)
    assert claim.extend(1, [batch(1)]) is None
    assert table.written() == [0] * CAPACITY
    assert [message.claimed.abandons for message in said] == [True]


def test_extend_when_the_copy_fails_then_nothing_is_on_record_and_the_server_is_informed(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = table.claim()
    said: list[control_pb2.ClientMessage] = []
    monkeypatch.setattr(table.local, "send", said.append)

    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(local_claim, "fill_rows", interrupted)
    with pytest.raises(KeyboardInterrupt):
        claim.extend(1, [batch(1)])
    assert (table.file.num_claimed, table.file.num_written) == (3, 0)
    assert [message.claimed.abandons for message in said] == [True]
    assert claim.extend(2, [batch(2)]) is None


def test_extend_when_a_call_was_interrupted_between_claim_and_copy_then_abandoned(table: Table) -> None:
    claim = table.claim()
    assert table.file.claim(2) == 0
    assert claim.extend(1, [batch(1)]) is None
    assert table.file.num_written == 0


def test_extend_when_the_server_must_be_informed_and_is_gone_then_connect_error_and_over(table: Table) -> None:
    claim = table.claim()
    table.local.close()
    with pytest.raises(ConnectError):
        table.claim()
    assert claim.extend(1, [batch(1)]) is None, "closed with the session"


def test_extend_when_the_bell_cannot_be_rung_then_the_row_is_on_record_and_nothing_follows(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = table.claim()
    table.file.request_messages(1)

    def lost(_: object) -> None:
        raise ConnectError(address="here", reason="lost")

    monkeypatch.setattr(table.local, "send", lost)
    with pytest.raises(ConnectError):
        claim.extend(1, [batch(1)])
    assert table.file.record(0) == (CLIENT, 1, 3)
    assert claim.extend(2, [batch(2)]) is None


def test_extend_when_the_store_is_deleted_then_over(table: Table, local_client: tdserve.Client) -> None:
    claim = table.claim()
    local_client.delete(table.handle.name)
    assert claim.extend(1, [batch(1)]) is None
    with pytest.raises(StoreNotFoundError):
        table.handle.extend(rows(1, 1))


def test_close_when_a_session_ends_then_its_lock_is_held_until_nothing_is_filled(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim, lock = table.claim(), table.session.welcome.local.lock_name
    begun, may_end = Event(), Event()
    table.file.request_messages(100)

    def fill_slowly(*arguments: Any) -> None:
        begun.set()
        assert may_end.wait(20.0)
        fill_rows(*arguments)

    def is_over() -> bool:
        try:
            table.local.keep(claim)
        except ConnectError:
            return True
        return False

    def is_locked() -> bool:
        return session_locks.is_held(table.local.root / "sessions", lock)

    monkeypatch.setattr(local_claim, "fill_rows", fill_slowly)
    with ThreadPoolExecutor(2) as threads:
        filling = threads.submit(claim.extend, 1, [batch(1)])
        assert begun.wait(20.0)
        closing = threads.submit(table.session.close)
        try:
            wait_for(is_over, "the end of the session")
            assert is_locked()
        finally:
            may_end.set()
        assert filling.result(20.0) is not None
        closing.result(20.0)
    wait_for(lambda: not is_locked(), "the release")
