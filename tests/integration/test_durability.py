"""Everything that was acknowledged is there after SIGKILL of the control process and a restart on the same root."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.base.ids import make_client_id
from tdserve.client.session.requests.request_numbers import RequestNumbers
from tdserve.client.session.session import Session
from tdserve.control.connection import ControlConnection
from tdserve.messages.content import write_layout
from tdserve.store.rows.generations import FILE_NAME, Generations
from tdserve.structure.captures.capture import capture
from tdserve.structure.trees import codec
from tdserve.v1 import control_pb2
from tests.contents import content_of
from tests.integration.crashing import Crashing, Writer
from tests.processes import is_gone, open_files, ready_worker, wait_for

pytestmark = pytest.mark.integration

ROW_ITEMS = 4096

CAPACITY = 20_000
ANSWERS_CAPACITY = 100

MAX_LOST_WRITES = 4
"""Writes whose rows were granted before a server was killed, and one whose rows are half overwritten."""
"""64 rows are 1 MiB, one message over the data transport; one row rides inside the request."""

NUM_LONG = 2000
"""Size of a store, in bytes, whose rows, listed one by one, make a request too long for the control channel."""


def rows(number: int, num_rows: int) -> TensorDict:
    """Returns rows that hold one number everywhere, so that a torn row shows."""
    body = torch.full((num_rows, ROW_ITEMS), number, dtype=torch.int32)
    return TensorDict({"number": torch.full((num_rows,), number), "body": body}, [num_rows])


def numbers_in(td: Any) -> list[int]:
    """Returns the number of each row; fails if a row is torn."""
    assert (td["body"] == td["number"].unsqueeze(-1)).all(), "a row is torn"
    found: list[int] = td["number"].tolist()
    return found


@pytest.fixture(scope="module")
def crashing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crashing]:
    """One server for all tests of this file; each test uses stores of its own."""
    with Crashing(tmp_path_factory.mktemp("crashing")) as made:
        yield made


@pytest.fixture(scope="module")
def client(crashing: Crashing) -> Iterator[tdserve.Client]:
    """A client that lives through every restart and reconnects by itself."""
    with crashing.server.client(transport="gloo", timeout_s=60.0) as connected:
        yield connected


@pytest.mark.slow
def test_writes_when_control_is_killed_again_and_again_then_each_is_stored_once_and_whole(
    crashing: Crashing, client: tdserve.Client
) -> None:
    large, small = (client.create_replay(name, like=rows(0, 1)[0], capacity=CAPACITY) for name in ("large", "small"))
    client.init_remote(rows(0, 64), "state")
    client.publish("policy", rows(0, 64))
    with crashing.server.client(transport="gloo", timeout_s=60.0) as other:
        writers = {
            "large": Writer(lambda number: large.extend(rows(number, 64))),
            "small": Writer(lambda number: other.replay("small").extend(rows(number, 1))),
            "state": Writer(lambda number: other.send(rows(number, 64), "state")),
            "policy": Writer(lambda number: client.publish("policy", rows(number, 64))),
        }
        for _ in range(2):
            for writer in writers.values():
                writer.goes_on()
            crashing.restart()
        for writer in writers.values():
            writer.goes_on()
        said = {name: writer.end() for name, writer in writers.items()}
    # The clients retried every unanswered request, so everything is there, and nothing twice.
    check_newest(Counter(numbers_in(large[:])), said["large"], 64)
    check_newest(Counter(numbers_in(small[:])), said["small"], 1)
    assert set(numbers_in(client.from_remote_init("state"))) == {said["state"][-1]}
    weights = client.latest("policy")
    assert weights is not None
    assert set(numbers_in(weights.data)) == {said["policy"][-1]}
    assert weights.version == 1 + len(said["policy"])
    assert small.info()["inserts"] == len(said["small"])


def check_newest(found: Counter[int], said: list[int], num_rows: int) -> None:
    """Checks that every acknowledged write is there once and whole, except writes that later ones have already
    overwritten."""
    is_all = len(said) * num_rows <= CAPACITY
    kept = said if is_all else said[-(CAPACITY // num_rows - MAX_LOST_WRITES) :]
    assert {number: found[number] for number in kept} == dict.fromkeys(kept, num_rows)
    assert max(found.values()) == num_rows
    assert set(found) <= set(said)


def generations_of(crashing: Crashing, client: tdserve.Client, name: str) -> Generations:
    """Returns the generations of a store's rows, as the server's processes map them."""
    description = client.describe(name)
    return Generations.open(crashing.root / "stores" / name / FILE_NAME, uid=description.uid, writable=True)


@pytest.mark.slow
def test_commit_when_a_crash_came_before_its_generations_then_it_is_completed(
    crashing: Crashing, client: tdserve.Client
) -> None:
    replay = client.create_replay("redo", like=rows(0, 1)[0], capacity=100)
    replay.extend(rows(1, 10))
    replay.extend(rows(2, 10))
    generations = generations_of(crashing, client, "redo")
    crashing.kill()
    before = generations.values[10:20].tolist()
    generations.values[10:20] = 1  # their state between the commit on record and its last step
    crashing.start()
    assert Counter(numbers_in(replay[:])) == {1: 10, 2: 10}
    assert generations.values[10:20].tolist() == before
    assert replay.extend(rows(3, 1)).tolist() == [20]


@pytest.mark.slow
def test_rows_when_control_was_killed_before_their_commit_then_they_are_free(
    crashing: Crashing, client: tdserve.Client
) -> None:
    replay = client.create_replay("holes", like=rows(0, 1)[0], capacity=100)
    replay.extend(rows(1, 10))
    generations = generations_of(crashing, client, "holes")
    client.create_replay("later", like=rows(0, 1)[0], capacity=10).extend(rows(1, 1))
    crashing.kill()
    generations.values[10:20] = 1  # reserved by a session that never came back
    crashing.start()
    assert numbers_in(replay[:]) == [1] * 10
    assert replay.extend(rows(2, 10)).tolist() == list(range(10, 20))


def test_write_when_control_is_killed_while_it_is_applied_then_it_is_whole_after_the_restart(
    crashing: Crashing, client: tdserve.Client
) -> None:
    client.init_remote(TensorDict({"x": torch.ones(NUM_LONG, dtype=torch.uint8)}, [NUM_LONG]), "journal")
    assert client.from_remote_init("journal")["x"].all()  # its files are made with the first use
    generations = generations_of(crashing, client, "journal")
    before = [2] * (NUM_LONG + 1)
    assert generations.values.tolist() == before
    worker = ready_worker(client)["pid"]
    os.kill(worker, signal.SIGSTOP)  # so that it stays between the journal and the end
    # Such a long index does not fit into the control channel through the worker: it goes to control directly.
    everywhere = torch.randperm(NUM_LONG)
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(client["journal"].set_at_, "x", torch.full((NUM_LONG,), 2, dtype=torch.uint8), everywhere)
        wait_for(lambda: generations.values.tolist() == [3] * (NUM_LONG + 1), "the begin of the write")
        crashing.kill()
        wait_for(lambda: is_gone(worker), "the end of the stopped data worker")
        crashing.start()
        assert set(client.from_remote_init("journal")["x"].tolist()) == {2}
        writing.result(timeout=60.0)
    assert generations.values.tolist() == [4] * (NUM_LONG + 1), "applied once"


def test_init_remote_when_control_is_killed_before_the_content_then_the_name_is_free(
    crashing: Crashing, client: tdserve.Client
) -> None:
    spec = capture(rows(0, 1)).spec
    request = control_pb2.CreateStoreRequest(name="unfilled", kind=control_pb2.STORE_KIND_TENSORDICT)
    request.spec.CopyFrom(codec.encode(spec))
    content = control_pb2.Content(fingerprint=spec.fingerprint, message_nbytes=write_layout(spec).message_nbytes)
    with HandMade(crashing.server.address, make_client_id()) as hand:
        hand.session.send(1, write=control_pb2.WriteRequest(store="unfilled", new_store=request, content=content))
        wait_for((crashing.root / "stores" / "unfilled" / FILE_NAME).exists, "the files of the store")
        assert "unfilled" not in client
        crashing.restart()
    assert client.init_remote(rows(3, 1), "unfilled") == 1


class HandMade:
    """A session made by hand, whose requests have numbers that the test chooses."""

    def __init__(self, address: str, client_id: bytes) -> None:
        self.connection = ControlConnection(address)
        self.connection.wait_ready(20.0)
        self.session = Session(
            self.connection, client_id=client_id, transport="gloo", requests=RequestNumbers(), timeout_s=30.0
        )

    def extend(self, name: str, number: int, *, request: int) -> bytes:
        """Extends by one row inside the request; returns the row numbers as they were sent."""
        captured = capture(rows(number, 1))
        fingerprint = capture(rows(number, 1)[0]).spec.prepend((ANSWERS_CAPACITY,)).fingerprint
        content = content_of(captured, fingerprint=fingerprint)
        asked = control_pb2.ExtendRequest(store=name, num_rows=1, content=content, timeout_s=10.0)
        return self.session.send(request, extend=asked).wait(20.0, "extend").done.indices

    def __enter__(self) -> HandMade:
        return self

    def __exit__(self, *_: object) -> None:
        self.session.close()
        self.connection.close()


@pytest.mark.slow
def test_request_when_it_is_repeated_after_a_lost_answer_then_it_is_answered_and_not_repeated(
    crashing: Crashing, client: tdserve.Client
) -> None:
    replay = client.create_replay("answers", like=rows(0, 1)[0], capacity=ANSWERS_CAPACITY)
    client_id = make_client_id()
    with HandMade(crashing.server.address, client_id) as first:
        answer = first.extend("answers", 1, request=5)
    with HandMade(crashing.server.address, client_id) as again:
        assert again.extend("answers", 1, request=5) == answer
    crashing.restart()
    with HandMade(crashing.server.address, client_id) as after:
        assert after.extend("answers", 1, request=5) == answer
        assert after.extend("answers", 2, request=6) != answer
    assert numbers_in(replay[:]) == [1, 2]


@pytest.mark.slow
def test_values_when_control_is_killed_then_they_are_back_and_can_be_written(
    crashing: Crashing, client: tdserve.Client
) -> None:
    client.init_remote(TensorDict({"text": "before", "x": torch.zeros(2)}, [2]), "values")
    crashing.restart()
    store = client["values"]
    assert store["text"] == "before"  # opened for reading first
    store.set("text", "after")
    crashing.restart()
    assert client["values"]["text"] == "after"


@pytest.mark.slow
def test_versions_when_a_crash_left_files_then_they_are_cleared_and_numbers_go_on(
    crashing: Crashing, client: tdserve.Client
) -> None:
    for number in (1, 2, 3):
        client.publish("files", rows(number, 64))
    folder = crashing.root / "stores" / "files" / "versions"
    files = {"synced.json", "3.safetensors"}
    assert {path.name for path in folder.iterdir()} == files | {"1.retired", "2.safetensors"}
    crashing.kill()
    os.rename(folder / "1.retired", folder / "1.safetensors")  # retired on record, not yet by name
    (folder / "new-lost.safetensors.part").write_bytes(b"unfinished")
    (folder / "new-whole.safetensors").write_bytes(b"without a number")
    (folder / "new-whole.values").write_bytes(b"its values")
    (folder / "4.safetensors").write_bytes(b"with one that is not on record")
    (folder / "9.safetensors").write_bytes(b"of nobody")
    crashing.start()
    assert client.publish("files", rows(4, 64)) == 4
    assert {path.name for path in folder.iterdir()} == files | {"2.retired", "4.safetensors"}
    weights = client.latest("files")
    assert weights is not None
    assert set(numbers_in(weights.data)) == {4}


@pytest.mark.slow
def test_store_when_its_files_are_damaged_then_the_server_starts_and_the_others_go_on(
    crashing: Crashing, client: tdserve.Client
) -> None:
    for name in ("damaged", "whole"):
        client.create_replay(name, like=rows(0, 1)[0], capacity=10).extend(rows(1, 1))
    crashing.kill()
    (crashing.root / "stores" / "damaged" / FILE_NAME).write_bytes(b"")
    crashing.start()
    with pytest.raises(tdserve.CorruptDataError, match="generation"):
        client.describe("damaged")
    assert numbers_in(client.replay("whole")[:]) == [1]


@pytest.mark.slow
def test_root_when_its_server_is_killed_then_it_stays_taken_until_the_data_workers_are_gone(
    crashing: Crashing, client: tdserve.Client
) -> None:
    worker = ready_worker(client)["pid"]
    assert str(crashing.root / "tdserve.lock") in open_files(worker), "the lock lives as long as anybody may write"
    os.kill(worker, signal.SIGSTOP)
    crashing.restart()
    assert is_gone(worker)
