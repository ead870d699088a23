from __future__ import annotations

import os
import pickle
import subprocess
import sys

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.client.session.by_address import get_process_client
from tests.processes import REPOSITORY, wait_for


def test_resident_when_asked_for_again_then_one_client_for_each_address_and_settings(
    server: tdserve.Server, client: tdserve.Client
) -> None:
    mine = get_process_client(client.recipe)
    assert mine is get_process_client(client.recipe)
    assert mine is not client
    assert (mine.address, mine.transport, mine.timeout_s) == (client.address, client.transport, client.timeout_s)
    with server.client(transport=client.transport, timeout_s=9.0) as other:
        assert get_process_client(other.recipe) is not mine
    mine.close()
    assert get_process_client(client.recipe) is not mine


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_resident_when_the_process_has_forked_then_the_child_has_its_own(local_client: tdserve.Client) -> None:
    mine = get_process_client(local_client.recipe)
    child = os.fork()
    if not child:
        try:
            own = get_process_client(local_client.recipe)
            os._exit(0 if own is not mine and not own.is_closed and own.has_session is False else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert get_process_client(local_client.recipe) is mine


LEAVING = """
import multiprocessing, pickle, sys, tdserve
store = pickle.loads(sys.stdin.buffer.read())
def read(method):
    assert store["a"].sum() == 28, method
if __name__ == "__main__":
    read("here")
    process = multiprocessing.get_context("fork").Process(target=read, args=("fork",))
    process.start()
    process.join(60.0)
    assert process.exitcode == 0
"""


@pytest.mark.full
@pytest.mark.once("gloo")
def test_residents_when_their_processes_end_then_closed(client: tdserve.Client, name: str) -> None:
    store = client.memmap(TensorDict({"a": torch.arange(8)}, [8]), name)
    before = set(_sessions(client))
    command = [sys.executable, "-W", "error::ResourceWarning", "-c", LEAVING]
    done = subprocess.run(
        command, input=pickle.dumps(store), cwd=REPOSITORY, capture_output=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr.decode()) == (0, "")
    wait_for(lambda: set(_sessions(client)) <= before, "the end of both sessions")


def _sessions(client: tdserve.Client) -> list[int]:
    return [each["session"] for each in client.stats()["sessions"]]
