"""The soak as a user runs it, and its checker on content that differs from the histories."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.soak.check import check
from tdserve.soak.history import Recorder
from tdserve.soak.round_stores import SLOTS, RoundStores, make_rows, make_slots
from tests.processes import REPOSITORY

pytestmark = pytest.mark.integration


@pytest.mark.full
@pytest.mark.timeout(300)
def test_soak_when_processes_are_killed_then_clean_and_nothing_is_left(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tdserve", "soak", "--minutes", "0.1", "--json"]
    command += ["--transports", "gloo", "--workers", "1", "--root", str(tmp_path / "root")]
    ran = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=280.0)
    found = json.loads(ran.stdout)
    assert ran.returncode == 0, ran.stderr
    assert found["verdict"] == "clean"
    assert found["rounds"] >= 2
    assert set(found["kills"]) == {"worker", "fork server", "control", "server", "client", "leaving client"}
    for kind in ("extends of claimed", "extends of asked", "changes of entries", "publishes", "overwrites"):
        assert found["counts"][f"{kind}: acknowledged"] > 0
    roles = {each["role"] for each in found["slopes"]}
    assert {"control", "worker", "fork server", "root", "client, gloo"} <= roles
    assert f": {found['rounds']} rounds, " in ran.stderr
    assert list(tmp_path.glob("root/stores/*")) == []


def extend(stores: RoundStores, folder: Path) -> None:
    """Acknowledges rows that nobody stored."""
    stores.open_table("asked").extend(make_rows("asked", 1, 0, 3))
    with Recorder(folder / "extend-asked-00001.jsonl") as recorder:
        recorder.write("call", first=0, num_rows=5)
        recorder.write("ok", answer=None)


def double(stores: RoundStores, folder: Path) -> None:
    """RoundStores rows twice."""
    for _ in range(2):
        stores.open_table("claimed").extend(make_rows("claimed", 1, 0, 3))
    with Recorder(folder / "extend-claimed-00001.jsonl") as recorder:
        recorder.write("call", first=0, num_rows=3)
        recorder.write("ok", answer=None)


def overwrite(stores: RoundStores, folder: Path) -> None:
    """Loses an acknowledged overwrite."""
    stores.client[stores.name(SLOTS)][0:2] = make_slots(1, 2)
    with Recorder(folder / "overwrite-00001.jsonl") as recorder:
        for value in (1, 2):
            recorder.write("call", first=0, last=2, value=value)
            recorder.write("ok", answer=None)


def enter(stores: RoundStores, folder: Path) -> None:
    """Loses an acknowledged entry."""
    with Recorder(folder / "enter-00001.jsonl") as recorder:
        recorder.write("call", key="1/0", what="put", value=7)
        recorder.write("ok", answer=1)


def consume(stores: RoundStores, folder: Path) -> None:
    """Has a job consumed and in the queue."""
    stores.open_queue().extend(TensorDict({"job": torch.tensor([5])}, [1]))
    for role in ("produce", "consume"):
        with Recorder(folder / f"{role}-00001.jsonl") as recorder:
            identity = {"index": [7], "generation": [4]} if role == "consume" else {}
            recorder.write("call", jobs=[5], **identity)
            recorder.write("ok", answer=[7])


def create(stores: RoundStores, folder: Path) -> None:
    """Has a deleted store come back."""
    name = stores.name("made-1-0")
    stores.client.init_remote(TensorDict({"count": torch.zeros(3)}, [3]), name)
    with Recorder(folder / "create-00001.jsonl") as recorder:
        recorder.write("call", name=name, what="delete")
        recorder.write("ok", answer=None)


def mix(stores: RoundStores, folder: Path) -> None:
    """Shows a reader a version with content of two."""
    with Recorder(folder / "follow-00001.jsonl") as recorder:
        recorder.write("saw", name="policy-0", version=1, id=3, content=[3.0, 4.0])


FAULTS: dict[Callable[[RoundStores, Path], None], str] = {
    extend: "acknowledged rows of 'asked' are lost",
    double: "rows of 'claimed' are there twice",
    overwrite: "slot 0 has 1, acknowledged was 2",
    enter: "entry '1/0' is 0, allowed was {7}",
    consume: "jobs were consumed, or stand in the queue, twice: [5]",
    create: "made-1-0' after {'name'",
    mix: "a mixed version",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "plant",
    [*list(FAULTS)[:3], *(pytest.param(plant, marks=pytest.mark.full) for plant in list(FAULTS)[3:])],
    ids=lambda plant: str(plant.__name__),
)
def test_check_when_a_fault_is_planted_then_found(
    server: tdserve.Server, tmp_path: Path, plant: Callable[[RoundStores, Path], None]
) -> None:
    with server.client() as client:
        stores = RoundStores(client, f"planted-{plant.__name__}-")
        stores.create()
        assert check(stores, tmp_path).faults == []
        for name in stores.list_names():
            client.delete(name)
        stores.create()
        plant(stores, tmp_path)
        faults = check(stores, tmp_path).faults
        assert any(FAULTS[plant] in fault for fault in faults), faults
        for name in stores.list_names():
            client.delete(name)
