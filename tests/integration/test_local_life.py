"""Servers that end and begin while local clients work, and clients of both transports side by side."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.client.local.end import open_local
from tests.integration.crashing import Crashing, Writer
from tests.integration.forked_clients import ForkedClients
from tests.integration.local_roles import NUM_ROWS, numbers_in, row, rows
from tests.processes import is_gone, quiet_port, wait_for

pytestmark = pytest.mark.integration

BEFORE, LOST, AFTER = 1, 2, 3


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tdserve.Server]:
    with tdserve.Server(tmp_path_factory.mktemp("life"), port=0) as started:
        yield started


@pytest.mark.slow
@pytest.mark.parametrize("text", ["", "text"])
def test_clients_when_of_different_transports_then_each_sees_what_the_other_writes(
    server: tdserve.Server, text: str
) -> None:
    names = {kind: f"{kind}-{text}" for kind in ("td", "r", "w", "q")}
    with server.client(transport="shm") as local, server.client(transport="gloo") as remote:
        assert (local.stats()["transport"], remote.stats()["transport"]) == ("shm", "gloo")
        remote.memmap(rows(0, text=text), names["td"])
        local.create_replay(names["r"], row(text), NUM_ROWS)
        remote.create_queue(names["q"], row(text), 2 * NUM_ROWS)
        for number, (writer, reader) in enumerate([(local, remote), (remote, local)] * 3, 1):
            handles = [each[names["td"]] for each in (writer, reader)]
            assert isinstance(handles[0], tdserve.StoreHandle)
            assert isinstance(handles[1], tdserve.StoreHandle)
            handles[0][1:3] = rows(number, 2, text=text)
            assert numbers_in(handles[1][1:3]) == [number] * 2
            version = writer.send(rows(number, text=text), names["td"])
            into = rows(0, text=text)
            assert reader.recv(into, names["td"], newer_than=version - 1) == version
            assert numbers_in(into) == numbers_in(handles[1][:]) == [number] * NUM_ROWS
            writer.replay(names["r"]).extend(rows(number, text=text))
            assert set(numbers_in(reader.replay(names["r"]).sample(20))) == {number}
            writer.replay(names["r"]).set_at_("body", torch.full((1, 500), -1.0).double(), torch.tensor([2]))
            assert bool((reader.replay(names["r"])[2]["body"] == -1).all())
            version = writer.publish(names["w"], rows(number, text=text))
            found = reader.latest(names["w"], newer_than=version - 1)
            assert found is not None
            assert numbers_in(found.data) == [number] * NUM_ROWS
            writer.queue(names["q"]).extend(rows(number, text=text))
            with reader.queue(names["q"]).take(NUM_ROWS) as taken:
                assert numbers_in(taken) == [number] * NUM_ROWS
        counted = local.stats()["transports"]
        assert counted["shm"]["bytes_in"] == counted["shm"]["bytes_out"] == 0


@pytest.mark.slow
def test_server_when_it_is_killed_and_started_again_then_local_clients_go_on_and_nothing_is_lost(
    tmp_path: Path,
) -> None:
    with Crashing(tmp_path) as crashing, crashing.server.client(transport="shm", timeout_s=60.0) as client:
        replay = client.create_replay("r", row(), 100_000)
        handle = client.memmap(rows(0), "td")
        client.publish("w", rows(0))
        mapped = client.latest("w", copy=False)
        assert mapped is not None

        def overwrite(number: int) -> None:
            handle[: NUM_ROWS // 2] = rows(number, NUM_ROWS // 2)

        writers = [
            Writer(lambda number: replay.extend(rows(number, 2))),
            Writer(overwrite),
            Writer(lambda number: client.publish("w", rows(number))),
        ]
        readers = [
            Writer(lambda _: numbers_in(handle[:])),
            Writer(lambda _: numbers_in(replay.sample(16, timeout_s=60.0))),
            Writer(lambda _: numbers_in(client.latest("w", copy=False).data)),  # type: ignore[union-attr]
        ]
        for each in writers + readers:
            each.goes_on()
        crashing.restart()
        for each in writers + readers:
            each.goes_on()
        for each in readers:
            each.end()
        extended, overwritten, published = (each.end() for each in writers)
        stored = numbers_in(replay[:])
        assert {number: stored.count(number) for number in extended} == dict.fromkeys(extended, 2)
        assert numbers_in(handle[: NUM_ROWS // 2]) == [overwritten[-1]] * (NUM_ROWS // 2)
        newest = client.latest("w")
        assert newest is not None
        assert numbers_in(newest.data) == [published[-1]] * NUM_ROWS
        assert numbers_in(mapped.data) == [0] * NUM_ROWS
        assert client.stats()["transport"] == "shm"
        assert replay.info()["reserved_rows"] == 0
        locks = list((tmp_path / "sessions").iterdir())
        wait_for(lambda: len(list((tmp_path / "sessions").iterdir())) == 1, f"the end of the old locks of {locks}")


@pytest.mark.slow
@pytest.mark.parametrize("is_up_again", [False, True], ids=["gone", "restarted"])
def test_session_when_its_server_is_killed_right_after_the_welcome_then_the_call_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_up_again: bool
) -> None:
    welcomed, may_look = threading.Event(), threading.Event()

    def look_late(*arguments: Any, **fields: Any) -> Any:
        welcomed.set()
        assert may_look.wait(30.0)
        return open_local(*arguments, **fields)

    monkeypatch.setattr("tdserve.client.session.session.open_local", look_late)
    with Crashing(tmp_path / "root") as crashing, ThreadPoolExecutor(1) as others:
        opened = others.submit(crashing.server.client, transport="shm", timeout_s=60.0)
        assert welcomed.wait(30.0)
        crashing.kill()
        if not is_up_again:
            may_look.set()
        crashing.start()
        may_look.set()
        with opened.result(60.0) as client:
            client.memmap(row(), "late")
            assert client.stats()["transport"] == "shm"


@pytest.mark.slow
def test_server_when_terminated_while_local_writers_stand_still_then_it_ends_in_its_grace_and_their_rows_stay_reserved(
    forked_clients: ForkedClients, tmp_path: Path
) -> None:
    stop = {"at": 1, "signal_number": int(signal.SIGSTOP)}
    server = tdserve.Server(tmp_path, port=quiet_port(), grace_s=0.5).start()
    address = server.address
    try:
        with server.client(transport="shm", timeout_s=20.0) as client:
            client.create_replay("r", row(), 3 * NUM_ROWS).extend(rows(BEFORE))
            client.memmap(rows(BEFORE), "td")
            client.publish("w", rows(BEFORE))
        with (
            forked_clients.start("write", address, "extend", "r", LOST, **stop) as extending,
            forked_clients.start("write", address, "overwrite", "td", LOST, **stop) as overwriting,
            forked_clients.start("write", address, "publish", "w", LOST, **stop) as publishing,
            server.client(transport="shm", timeout_s=20.0) as waiting,
        ):
            for writer in (extending, overwriting, publishing):
                writer.wait_stopped()
            handle = waiting["td"]
            errors: list[BaseException] = []

            def read() -> None:
                try:
                    handle.to_tensordict(timeout_s=1.0)
                except tdserve.TDServeError as error:
                    errors.append(error)

            thread = threading.Thread(target=read)
            thread.start()
            pid = server.pid
            os.kill(pid, signal.SIGTERM)
            wait_for(lambda: is_gone(pid), "the end of the server", timeout_s=25.0)
            thread.join(20.0)
            assert errors
            server.shutdown()
            server = tdserve.Server(tmp_path, port=int(address.rpartition(":")[2])).start()
            with server.client(transport="shm", timeout_s=20.0) as client:
                replay = client.replay("r")
                assert replay.info()["reserved_rows"] == NUM_ROWS
                assert numbers_in(replay[:]) == [BEFORE] * NUM_ROWS
                with pytest.raises(tdserve.CorruptDataError):
                    client.from_remote_init("td")
                newest = client.latest("w")
                assert newest is not None
                assert newest.version == 1
                for writer in (extending, overwriting, publishing):
                    writer.signal(signal.SIGCONT)
                    assert writer.line() == "connected shm"
                    said = writer.line()
                    assert said.startswith("done"), said
                assert sorted(numbers_in(replay[:])) == [BEFORE] * NUM_ROWS + [LOST] * NUM_ROWS
                assert numbers_in(client.from_remote_init("td")) == [LOST] * NUM_ROWS
    finally:
        server.shutdown()


@pytest.mark.slow
def test_server_when_it_and_its_writers_are_killed_together_then_every_row_is_free_once(
    forked_clients: ForkedClients, tmp_path: Path
) -> None:
    stop = {"at": 1, "signal_number": int(signal.SIGSTOP)}
    with Crashing(tmp_path) as crashing, crashing.server.client(transport="shm", timeout_s=60.0) as client:
        address = crashing.server.address
        replay = client.create_replay("r", TensorDict({"content": row()}, []), 3 * NUM_ROWS)
        replay.extend(TensorDict({"content": rows(BEFORE, 2 * NUM_ROWS)}, [2 * NUM_ROWS]))
        with (
            forked_clients.start("write", address, "overwrite", "r", LOST, nested=True, **stop) as overwriting,
            forked_clients.start("write", address, "extend", "r", LOST, nested=True, **stop) as extending,
        ):
            for writer in (overwriting, extending):
                writer.wait_stopped()
            crashing.kill()
            for writer in (overwriting, extending):
                writer.kill()
            crashing.start()
        wait_for(lambda: replay.info()["reserved_rows"] == 0, "the proof that both are gone")
        assert numbers_in(replay[:]["content"]) == [BEFORE] * NUM_ROWS
        taken = [
            row_number
            for number in (AFTER, AFTER + 1)
            for row_number in replay.extend(TensorDict({"content": rows(number)}, [NUM_ROWS])).tolist()
        ]
        assert sorted(taken) == [*range(NUM_ROWS), *range(2 * NUM_ROWS, 3 * NUM_ROWS)]
        assert sorted(numbers_in(replay[:]["content"])) == sorted(
            [BEFORE] * NUM_ROWS + [AFTER] * NUM_ROWS + [AFTER + 1] * NUM_ROWS
        )
        for _ in range(3):
            replay.extend(TensorDict({"content": rows(AFTER, 3 * NUM_ROWS)}, [3 * NUM_ROWS]))
            assert numbers_in(replay[:]["content"]) == [AFTER] * 3 * NUM_ROWS
