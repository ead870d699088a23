"""tdserve/observer/snapshots.py: many callers cost the server one question."""

from __future__ import annotations

import asyncio

import pytest

from tdserve.base.errors import ConnectError
from tdserve.observer import snapshots
from tdserve.observer.snapshots import Snapshots
from tests.unit.observer.figures import RecordedServer, make_figures


def test_snapshot_when_many_ask_then_one_question() -> None:
    server = RecordedServer(make_figures())

    async def scenario() -> None:
        taken = Snapshots(server)
        found = await asyncio.gather(*(taken.get() for _ in range(100)))
        assert {id(each) for each in found} == {id(found[0])}

    asyncio.run(scenario())
    assert server.num_questions == 1


def test_snapshot_when_it_is_old_then_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "FRESH_S", 0.0)
    server = RecordedServer(make_figures())

    async def scenario() -> None:
        taken = Snapshots(server)
        assert await taken.get() is not await taken.get()

    asyncio.run(scenario())
    assert server.num_questions == 2


def test_snapshot_when_the_server_is_gone_then_has_the_reason_and_no_figures() -> None:
    found = asyncio.run(Snapshots(RecordedServer(None)).get())
    assert found.figures is None
    assert "it is gone" in found.reason


def test_stores_when_asked_by_name_and_the_server_is_gone_then_error() -> None:
    with pytest.raises(ConnectError):
        asyncio.run(Snapshots(RecordedServer(None)).observe_stores(["x"]))
    server = RecordedServer(make_figures(2), ("a", "b"))
    assert len(asyncio.run(Snapshots(server).observe_stores(["a"]))) == 2
    assert asyncio.run(Snapshots(server).list_names()) == ["a", "b"]
