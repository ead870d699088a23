"""Clients that borrow the server's files, and write over a channel, take the same exam.

Here they could see the files; ``tests/integration/test_lent_files`` has clients that cannot.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import tdserve
from tdserve.client.local.root_files import LentFiles
from tests.conformance.keyed_life_suite import KeyedLifeSuite
from tests.conformance.kinds_suite import KindsSuite
from tests.conformance.service_suite import LARGE, ServiceSuite, rows
from tests.conformance.suite import Connect
from tests.lending_kernel import needs_lending
from tests.roots import make_quick_root

pytestmark = [pytest.mark.full, needs_lending]


@pytest.fixture(scope="module")
def server() -> Iterator[tdserve.Server]:
    """A server whose folder of stores others may not enter, as with tokens; otherwise it lends nothing."""
    with make_quick_root() as root:
        (root / "stores").mkdir(0o700)
        with tdserve.Server(root) as made:
            yield made


class _Borrowing:
    @pytest.fixture
    def connect(self, server: tdserve.Server, monkeypatch: pytest.MonkeyPatch) -> Connect:
        monkeypatch.setattr("tdserve.client.local.end.find_files", lambda welcome, access: LentFiles(welcome))
        return lambda: server.client(transport="shm")


class TestLentService(_Borrowing, ServiceSuite):
    @pytest.fixture
    def transport(self) -> str:
        return "shm"

    def test_stats_when_content_moved_then_name_the_transport(
        self, client: tdserve.Client, name: str, transport: str
    ) -> None:
        """Counts what is read as shared memory, and what is written where it moves."""
        before = client.stats()["transports"]
        replay = client.create_replay(f"{name}-rows", rows(1)[0], LARGE)
        replay.extend(rows(LARGE))
        replay.sample(LARGE)
        after = client.stats()
        assert after["transport"] == transport
        for way, key in ((transport, "transfers_out"), ("gloo", "transfers_in")):
            assert after["transports"][way][key] == before.get(way, {}).get(key, 0) + 1


class TestLentKeyed(_Borrowing, KeyedLifeSuite):
    pass


class TestLentKinds(_Borrowing, KindsSuite):
    pass
