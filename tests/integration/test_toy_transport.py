"""A channel transport that only this test knows: a new one needs only a line in each table.

The processes of the server register it as they start, by a ``sitecustomize.py``; this process does so by monkeypatch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.base import config
from tdserve.base.errors import InvalidRequestError, NotSupportedError
from tdserve.rules.channel_transports import CHANNEL_TRANSPORTS
from tdserve.transport.session_channels import OPENERS
from tests.integration.toy_transport import REGISTRATION, TOY, open_toy

pytestmark = pytest.mark.usefixtures("borrows_nothing")

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tdserve.Server]:
    """A server whose control process and data worker have it."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "sitecustomize.py").write_text(REGISTRATION)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")]))
        started = tdserve.Server(folder / "root").start()
    yield started
    started.shutdown()


@pytest.fixture
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same in this process, the client's."""
    monkeypatch.setitem(CHANNEL_TRANSPORTS, "toy", TOY)
    monkeypatch.setitem(OPENERS, "toy", open_toy)
    monkeypatch.setattr(config, "TRANSPORTS", (*config.TRANSPORTS, "toy"))


@pytest.mark.slow
@pytest.mark.usefixtures("_registered")
def test_toy_when_asked_for_then_all_content_goes_by_it(server: tdserve.Server) -> None:
    rows = TensorDict({"x": torch.rand(64, 1000), "n": torch.arange(64)}, [64])
    with server.client(transport="toy") as client:
        replay = client.create_replay("rows", like=rows[0], capacity=64)
        assert replay.extend(rows).tolist() == list(range(64))
        sample = replay.sample(32)
        assert torch.equal(sample["x"], rows["x"][sample["index"]])
        assert torch.equal(replay[:]["x"], rows["x"])
        stats = client.stats()
    assert stats["transport"] == "toy"
    assert stats["transports"]["toy"]["bytes_in"] >= rows["x"].nbytes
    assert stats["transports"]["toy"]["transfers_out"] >= 2
    assert "gloo" not in stats["transports"]


@pytest.mark.usefixtures("_registered")
def test_toy_when_another_is_asked_for_or_none_then_that_one(server: tdserve.Server) -> None:
    for transport, expected in (("gloo", "gloo"), ("auto", "shm")):
        with server.client(transport=transport) as client:
            assert client.stats()["transport"] == expected


def test_toy_when_the_server_does_not_have_it_then_refused_by_name(
    server: tdserve.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CHANNEL_TRANSPORTS, "other toy", TOY)
    monkeypatch.setattr(config, "TRANSPORTS", (*config.TRANSPORTS, "other toy"))
    with pytest.raises(NotSupportedError, match="transport 'other toy'"):
        server.client(transport="other toy")


@pytest.mark.usefixtures("_registered")
def test_toy_when_the_two_ends_do_not_suit_it_then_refused_by_name_with_the_reason(
    server: tdserve.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tdserve.client.session.channels.hello.read_boot_id", lambda: "another machine")
    with pytest.raises(NotSupportedError, match=r"transport 'toy'.*it is a toy for one machine"):
        server.client(transport="toy")


@pytest.mark.slow
def test_toy_when_this_process_does_not_have_it_then_refused_with_the_names_there_are(server: tdserve.Server) -> None:
    with pytest.raises(InvalidRequestError, match=r"one of auto, .*, got 'toy'"):
        server.client(transport="toy")
