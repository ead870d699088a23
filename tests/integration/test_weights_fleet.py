"""Weights and many readers: no reader sees a mixture or an older version again, and the disk holds only kept
versions."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from torch import nn

import tdserve
from tests.integration.crashing import Crashing
from tests.integration.forked_clients import ForkedClients
from tests.integration.local_roles import numbers_in, rows
from tests.processes import wait_for

pytestmark = pytest.mark.integration

NUM_ROWS = 300
"""1.2 MB: over the channel, and large enough for checksums."""

NUM_LARGE_ROWS = 12_000
"""48 MB, so that a part is under way when a process stops or dies."""

KEEP = 2


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tdserve.Server]:
    with tdserve.Server(tmp_path_factory.mktemp("fleet"), port=0) as started:
        yield started


@pytest.fixture(scope="module")
def client(server: tdserve.Server) -> Iterator[tdserve.Client]:
    with server.client(transport="gloo", timeout_s=30.0) as made:
        yield made


def files_of(server: tdserve.Server, name: str) -> list[str]:
    """Names of the files of a store's versions."""
    folder = Path(server.config.root) / "stores" / name / "versions"
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".json")


@pytest.mark.slow
@pytest.mark.parametrize("last", [8, pytest.param(50, marks=pytest.mark.full)])
def test_publish_when_thirty_two_processes_follow_then_none_sees_a_mixture_or_goes_back_and_the_disk_holds_k(
    forked_clients: ForkedClients, server: tdserve.Server, client: tdserve.Client, last: int
) -> None:
    num_readers, name = 32, f"w{last}"
    followers = [
        forked_clients.start(
            "follow", server.address, name, last, transport="shm" if number % 2 else "gloo", copy=bool(number % 4 < 2)
        )
        for number in range(num_readers)
    ]
    for number, follower in enumerate(followers):
        assert follower.line() == f"connected {'shm' if number % 2 else 'gloo'}"
    assert client.publish(name, rows(1, NUM_ROWS)) == 1
    for follower in followers:
        assert follower.line() == "begins with 1"
    for number in range(2, last + 1):
        assert client.publish(name, rows(number, NUM_ROWS)) == number
    for follower in followers:
        word, *versions = follower.line().split()
        assert (word, versions[0], versions[-1]) == ("seen", "1", str(last))
        assert follower.line() == "ended 0"
    wait_for(lambda: client.stats()["num_sessions"] == 1, "the end of the readers' sessions")
    kept = [f"{last - 1}.safetensors", f"{last}.safetensors"]

    def version_files() -> list[str]:
        return [file for file in files_of(server, name) if file.endswith(".safetensors")]

    wait_for(lambda: version_files() == kept, "the end of reads of older versions")
    assert len(files_of(server, name)) <= 2 * KEEP + 1


@pytest.mark.slow
def test_publish_when_its_client_is_killed_in_the_middle_over_gloo_then_the_version_before_stays(
    forked_clients: ForkedClients, server: tdserve.Server, client: tdserve.Client
) -> None:
    for _ in range(KEEP + 2):
        version = client.publish("killed", rows(1, NUM_LARGE_ROWS))
    publisher = forked_clients.start("publish_partly", server.address, "killed", 2, NUM_LARGE_ROWS)
    assert publisher.line() == "half"
    publisher.wait_killed()
    found = client.latest("killed")
    assert found is not None
    assert (found.version, set(numbers_in(found.data))) == (version, {1})
    wait_for(lambda: client.stats()["num_sessions"] == 1, "the end of the publisher's session")
    wait_for(lambda: not any(".part" in name for name in files_of(server, "killed")), "the end of its file")
    assert len(files_of(server, "killed")) <= 2 * KEEP + 1
    assert client.publish("killed", rows(3, NUM_LARGE_ROWS)) > version
    client.delete("killed")


@pytest.mark.slow
def test_latest_when_a_reader_stands_still_in_the_middle_then_its_version_stays_whole_however_many_follow(
    forked_clients: ForkedClients, server: tdserve.Server, client: tdserve.Client
) -> None:
    assert client.publish("still", rows(1, NUM_LARGE_ROWS)) == 1
    with forked_clients.start("pull", server.address, "still", num_posted=2) as reader:
        reader.wait_stopped()
        for number in range(2, KEEP + 5):
            client.publish("still", rows(number, NUM_LARGE_ROWS))
        reader.signal(signal.SIGCONT)
        assert reader.line() == "version 1 1"
    client.delete("still")


@pytest.mark.slow
def test_latest_when_an_encoder_is_frozen_then_only_the_head_travels(
    server: tdserve.Server, client: tdserve.Client
) -> None:
    def policy() -> nn.ModuleDict:
        return nn.ModuleDict({"encoder": nn.Linear(4096, 2048), "head": nn.Linear(250, 100)})

    own, other, lazy = policy(), policy(), policy()
    parameters = dict(other.named_parameters())

    def sent_nbytes() -> int:
        return int(client.stats()["transports"].get("gloo", {}).get("bytes_out", 0))

    def sent_since(before: int, at_least: int) -> int:
        """Bytes that a pull has moved. They are counted when the reader has them, or a moment later, so the second of
        two transfers may be counted after the first one was seen."""

        def moved() -> int | None:
            nbytes = sent_nbytes() - before
            return nbytes if nbytes >= at_least else None

        return wait_for(moved, f"a count of {at_least} bytes that were sent")

    def step(reader: tdserve.Client, into: nn.Module | None = None, *, at_least: int = 1) -> int:
        with torch.no_grad():
            next(own["head"].parameters()).add_(1)
        client.publish("frozen", own)
        before = sent_nbytes()
        found = reader.latest("frozen", into=into)
        assert found is not None
        data = found.data if into is None else TensorDict.from_module(into).data
        assert (data == TensorDict.from_module(own).data).all()
        kept[:] = [found.data]
        return sent_since(before, at_least)

    kept: list[object] = []
    whole_nbytes = 32_000_000  # and a little more
    with server.client(transport="gloo", timeout_s=30.0) as reader:
        step(reader, into=other, at_least=whole_nbytes)
        nbytes = wait_for(lambda: (moved := step(reader, into=other)) < 1_000_000 and moved, "a pull of the head")
        assert nbytes >= 100_000
        assert dict(other.named_parameters()) == parameters
        step(reader, at_least=whole_nbytes)  # it has nothing of its own
        wait_for(lambda: 0 < step(reader) < 1_000_000, "a pull of the head")
        kept.clear()
        gc.collect()
        step(reader, at_least=whole_nbytes)
        step(reader, into=lazy, at_least=whole_nbytes)
        before = sent_nbytes()
        half = reader.latest("frozen", dtype=torch.bfloat16)
        assert half is not None
        assert torch.equal(half.data["encoder", "weight"], next(own["encoder"].parameters()).bfloat16())
        assert sent_since(before, 16_000_000) < 17_500_000
    client.delete("frozen")


@pytest.mark.slow
def test_subscribe_when_the_server_is_killed_then_it_goes_on_and_never_back(tmp_path: Path) -> None:
    with Crashing(tmp_path) as crashing, ExitStack() as stack:
        clients = [
            stack.enter_context(crashing.server.client(timeout_s=60.0, transport=transport))
            for transport in ("gloo", "shm")
        ]
        clients[0].publish("w", rows(1))
        waiting = []
        for client in clients:
            subscription = stack.enter_context(client.subscribe("w"))
            assert next(subscription).version == 1
            waiting.append(client.run_later(partial(next, subscription)))
        crashing.restart()
        assert clients[0].publish("w", rows(2)) == 2
        for later in waiting:
            found = later.result(timeout=60.0)
            assert (found.version, set(numbers_in(found.data))) == (2, {2})
