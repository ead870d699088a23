from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.base.deadline import Deadline
from tdserve.base.errors import DeadlineExceededError, StoreNotFoundError, TDServeError
from tdserve.client.transfers.read_selection import read_selection
from tdserve.messages.selection.selection import Selection, encode
from tdserve.structure.captures.capture import capture
from tests.errors import raises
from tests.processes import wait_for

TD = TensorDict({"a": torch.arange(6.0).view(3, 2), "b": torch.arange(3), "t": "text"}, [3])


def test_read_when_the_structure_is_known_then_the_selection_of_it(client: tdserve.Client, name: str) -> None:
    client.init_remote(TD, name)
    selection = encode(slice(1, None), batch_size=(3,))
    deadline = Deadline.after(20.0)
    for spec in (None, capture(TD).spec):
        content = read_selection(client, name, selection, keys=[("b",)], spec=spec, deadline=deadline)
        assert content is not None
        assert content.build()["b"].tolist() == [1, 2]
        assert content.version == 1


def test_read_when_nothing_newer_comes_then_deadline(client: tdserve.Client, name: str) -> None:
    client.init_remote(TD, name)
    with pytest.raises(DeadlineExceededError, match="newer than version 1"):
        read_selection(client, name, Selection(), newer_than=1, deadline=Deadline.after(0.05))


def rows(num_rows: int) -> TensorDict:
    """More than one mail holds."""
    return TensorDict({"a": torch.arange(4 * num_rows).view(num_rows, 4), "b": torch.rand(num_rows)}, [num_rows])


def test_read_when_the_client_waits_for_the_content_itself_then_one_message_each_way(
    remote_client: tdserve.Client, name: str
) -> None:
    td = rows(1_000)
    handle = remote_client.memmap(td, name)
    index = torch.randint(1_000, (256,))

    def sent() -> tuple[int, int]:
        counts = remote_client.stats()["transports"]["gloo"]
        return counts["transfers_out"], counts["bytes_out"]

    def read(index: torch.Tensor | slice) -> tuple[int, int]:
        num_before, nbytes_before = sent()
        assert (handle[index] == td[index]).all()
        wait_for(lambda: sent()[0] > num_before, "the count of the read")
        return sent()[0] - num_before, sent()[1] - nbytes_before

    read(slice(None))  # waits until the channel is open; fewer rows would be in the answer until then
    read(index)  # control lets the worker read the store, which answers alone from then on
    for _ in range(2):
        num_messages, nbytes = read(index)
        assert num_messages == 1
        assert nbytes >= 256 * 36


def test_read_when_the_content_takes_several_messages_then_whole(remote_client: tdserve.Client, name: str) -> None:
    td = rows(300_000)
    handle = remote_client.memmap(td, name)
    assert (handle[:] == td).all()
    assert (handle[10:] == td[10:]).all()


def test_read_when_the_store_was_replaced_then_the_new_one_or_an_error_with_its_name(
    remote_client: tdserve.Client, name: str
) -> None:
    td = rows(1_000)
    old = remote_client.memmap(td, name)
    assert (old[:300] == td[:300]).all()
    remote_client[name]["c"] = torch.ones(1_000)  # known to another handle only
    assert (old[:300].exclude("c") == td[:300]).all()
    remote_client.delete(name)
    with raises(StoreNotFoundError, name=name):
        old[:300]
    remote_client.create_replay(name, like=td[0], capacity=10)
    with pytest.raises(TDServeError, match=name):
        old[:300]
    remote_client.delete(name)


@pytest.mark.slow
def test_read_when_rows_are_written_again_and_again_then_each_is_as_of_one_moment(
    remote_client: tdserve.Client, server: tdserve.Server, name: str
) -> None:
    td = TensorDict({"a": torch.zeros(4_096, 8)}, [4_096])
    handle, is_over = remote_client.memmap(td, name), Event()
    seen: set[float] = set()

    def write() -> None:
        with server.client(timeout_s=20.0) as writer:
            for value in itertools.count(1):
                if is_over.is_set():
                    return
                writer[name].set_at_("a", torch.full((4_096, 8), float(value)), slice(None))

    def look() -> bool:
        found = handle[:256]["a"]
        assert (found == found[0, 0]).all()
        seen.add(float(found[0, 0]))
        return len(seen) >= 20

    with ThreadPoolExecutor(1) as threads:
        writing = threads.submit(write)
        try:
            wait_for(look, "twenty writes that were read")
        finally:
            is_over.set()
        writing.result(20.0)
