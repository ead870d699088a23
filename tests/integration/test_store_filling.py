"""Stores that are filled by several writes: nobody else sees them before they are whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.client.session.store_changes import create_store
from tdserve.client.session.store_options import StoreOptions
from tdserve.client.tensordicts import store_filling
from tdserve.client.tensordicts.store_filling import StoreFilling
from tests.errors import raises
from tests.integration.crashing import Crashing
from tests.processes import wait_for

pytestmark = pytest.mark.integration

OPTIONS = StoreOptions(False, None, None)


def rows(start: int, num_rows: int) -> dict[str, Any]:
    """Rows of all kinds of leaves, whose content is their number."""
    number = np.arange(start, start + num_rows)
    ragged = [torch.full((int(each) % 4,), int(each)) for each in number]
    return {
        "number": number,
        "next": {"half": number.astype(np.float16)},
        "text": [f"row {each}" for each in number],
        "ragged": torch.nested.nested_tensor(ragged, layout=torch.jagged),
    }


def check(store: Any, num_rows: int) -> None:
    """Asserts that a store has ``rows(0, num_rows)``."""
    found = store.to_tensordict()
    assert found["number"].tolist() == list(range(num_rows))
    assert found["next", "half"].tolist() == list(range(num_rows))
    assert list(found["text"]) == [f"row {each}" for each in range(num_rows)]
    assert [each.tolist() for each in found["ragged"].unbind()] == [[n] * (n % 4) for n in range(num_rows)]


@pytest.fixture
def observer(server: tdserve.Server) -> Iterator[tdserve.Client]:
    """Another client."""
    with server.client() as connected:
        yield connected


def test_store_when_filled_in_parts_then_others_see_it_when_it_is_whole(
    client: tdserve.Client, observer: tdserve.Client, name: str
) -> None:
    filling = StoreFilling(client, name, 12, OPTIONS)
    for start, num_rows in ((0, 5), (5, 1), (6, 6)):
        filling.write(rows(start, num_rows), [num_rows])
        assert name not in observer
        assert name not in observer.stores()
        with pytest.raises(tdserve.StoreNotFoundError):
            observer.describe(name, timeout_s=0)
        with pytest.raises(tdserve.StoreExistsError):
            observer.memmap(TensorDict({"x": torch.zeros(2)}, [2]), name)
    handle = filling.show()
    check(handle, 12)
    check(observer[name], 12)
    observer[name].set_at_("number", torch.tensor(-1), 3)
    assert client[name][3]["number"] == -1


def test_store_when_rows_are_missing_then_not_shown_and_given_up(
    client: tdserve.Client, observer: tdserve.Client, name: str
) -> None:
    filling = StoreFilling(client, name, 12, OPTIONS)
    with pytest.raises(tdserve.WrongStateError, match="0 of 12"):
        filling.show()
    filling.write(rows(0, 5), [5])
    with pytest.raises(tdserve.WrongStateError, match="5 of 12"):
        filling.show()
    with pytest.raises(tdserve.WrongStateError, match="12 rows"):
        filling.write(rows(5, 8), [8])
    with raises(tdserve.SpecMismatchError, key="number"):
        filling.write({**rows(5, 7), "number": np.zeros((7, 2), np.int64)}, [7])
    filling.give_up()
    filling.give_up()
    observer.memmap(TensorDict({"x": torch.zeros(2)}, [2]), name)


def test_store_when_its_name_is_taken_then_refused_and_the_other_one_is_unchanged(
    client: tdserve.Client, store: Any, name: str
) -> None:
    filling = StoreFilling(client, name, 5, OPTIONS)
    with pytest.raises(tdserve.StoreExistsError):
        filling.write(rows(0, 5), [5])
    filling.give_up()


def test_store_when_interrupted_before_the_answer_to_its_creation_then_given_up_and_the_name_is_free(
    client: tdserve.Client, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = StoreFilling(client, f"{name}-other", 12, OPTIONS)
    other.write(rows(0, 5), [5])

    def interrupt(*arguments: Any) -> Any:
        create_store(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(store_filling, "create_store", interrupt)
        filling = StoreFilling(client, name, 12, OPTIONS)
        with pytest.raises(KeyboardInterrupt):
            filling.write(rows(0, 5), [5])
    filling.give_up()
    client.memmap(TensorDict({"x": torch.zeros(2)}, [2]), name)
    other.write(rows(5, 7), [7])
    check(other.show(), 12)


def test_store_when_its_client_closes_then_the_name_is_free(
    server: tdserve.Server, client: tdserve.Client, name: str
) -> None:
    with server.client(transport=client.transport) as writer:
        filling = StoreFilling(writer, name, 12, OPTIONS)
        filling.write(rows(0, 5), [5])

    def create() -> Any:
        try:
            return client.memmap(TensorDict({"x": torch.zeros(2)}, [2]), name)
        except tdserve.StoreExistsError:  # the server has yet to notice
            return None

    wait_for(create, "the end of the store")


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["gloo", "shm"])
def test_store_when_the_server_restarts_then_nothing_is_left_and_the_next_write_fails(
    tmp_path: Path, transport: Any
) -> None:
    with Crashing(tmp_path) as crashing, crashing.server.client(transport=transport, timeout_s=60.0) as client:
        lost, other = StoreFilling(client, "lost", 12, OPTIONS), StoreFilling(client, "other", 5, OPTIONS)
        lost.write(rows(0, 5), [5])
        other.write(rows(0, 5), [5])
        crashing.restart()
        with pytest.raises(tdserve.TransferAbortedError, match="nothing of it is left"):
            lost.write(rows(5, 7), [7])
        with pytest.raises(tdserve.TransferAbortedError, match="nothing of it is left"):
            other.show()
        assert client.stores() == []
        # Another store of that name is another store.
        client.memmap(TensorDict(rows(0, 12), [12]), "lost")
        with pytest.raises(tdserve.TransferAbortedError):
            lost.write(rows(5, 7), [7])
        lost.give_up()
        check(client["lost"], 12)
        folders = crashing.root / "stores"
        wait_for(lambda: [each.name for each in folders.iterdir()] == ["lost"], "the end of the other folders")


@pytest.mark.slow
def test_store_when_rows_of_it_are_missing_after_a_restart_then_a_whole_one_stays(tmp_path: Path) -> None:
    with Crashing(tmp_path) as crashing, crashing.server.client(timeout_s=60.0) as client:
        filling = StoreFilling(client, "shown", 12, OPTIONS)
        filling.write(rows(0, 5), [5])
        filling.write(rows(5, 7), [7])
        filling.show()
        crashing.restart()
        check(client["shown"], 12)
