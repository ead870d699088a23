from __future__ import annotations

import copy
import os
import pickle

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.client.session.by_address import OfProcess

ROWS = TensorDict({"a": torch.arange(8)}, [8])


class _Counting:
    def __init__(self) -> None:
        self.num_made = 0

    @OfProcess
    def made(self) -> int:
        """Makes a number."""
        self.num_made += 1
        return self.num_made


def sessions(client: tdserve.Client) -> set[int]:
    """Returns the numbers of the sessions at the client's server."""
    return {each["session"] for each in client.stats()["sessions"]}


def test_attribute_when_asked_for_then_made_once_unless_it_was_assigned() -> None:
    counting = _Counting()
    assert (counting.made, counting.made, counting.num_made) == (1, 1, 1)
    other = _Counting()
    other.made = 7
    assert (other.made, other.num_made) == (7, 0)
    assert type(_Counting.made) is OfProcess


def test_handles_when_pickled_then_by_address_over_one_client_that_is_made_when_it_is_needed(
    client: tdserve.Client, name: str
) -> None:
    store = client.memmap(ROWS, name)
    replay = client.create_replay(f"{name}-r", ROWS[0], 8)
    replay.extend(ROWS[4:])
    before = sessions(client)
    found_store, found_replay = pickle.loads(pickle.dumps((store, replay)))
    assert pickle.loads(pickle.dumps(found_store)).name == name  # before it was used, too
    assert sessions(client) == before
    assert found_store[3]["a"] == 3
    assert found_replay.extend(ROWS[:4]).tolist() == [4, 5, 6, 7]
    assert replay[:]["a"].tolist() == [4, 5, 6, 7, 0, 1, 2, 3]
    assert len(sessions(client) - before) <= 1, "none if an earlier test has opened it"
    with pytest.raises(tdserve.KeyNotFoundError):
        found_store["b"]


def test_handle_when_copied_then_over_the_same_client(client: tdserve.Client, name: str) -> None:
    store = client.memmap(ROWS, name)
    assert store[2]["a"] == 2
    before = sessions(client)
    copied = copy.copy(store)
    assert copied is not store
    assert copied[2]["a"] == 2
    assert sessions(client) == before


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_handles_when_the_process_has_forked_then_both_go_on(client: tdserve.Client, name: str) -> None:
    store = client.memmap(ROWS, name)
    replay = client.create_replay(f"{name}-r", ROWS[0], 8)
    replay.extend(ROWS[:2])
    child = os.fork()
    if not child:
        try:
            store.set_at_("a", torch.tensor(70), 7)
            replay.extend(ROWS[2:4])
            os._exit(0 if len(replay.sample(2)) == 2 and store["a"][7] == 70 else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert store["a"].tolist() == [0, 1, 2, 3, 4, 5, 6, 70]
    assert replay[:]["a"].tolist() == [0, 1, 2, 3]
