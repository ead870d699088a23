"""Reads of a store that is deleted and made anew all the time, under one name."""

from __future__ import annotations

import threading

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tests.integration.conftest import FreshServer

pytestmark = pytest.mark.integration

NUM_ROUNDS = 75
DTYPES = (torch.float32, torch.float64, torch.int64)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["gloo", "shm"])
def test_reads_when_their_store_is_made_anew_then_of_one_store_or_it_is_not_there(
    fresh_server: FreshServer, transport: str
) -> None:
    server, is_over = fresh_server(), threading.Event()
    failures: list[str] = []
    num_reads = [0]

    def read(number: int) -> None:
        with server.client(transport=transport, timeout_s=20.0) as client:
            while not is_over.is_set():
                try:
                    found = client["anew"][:]["a"] if number % 2 else client["anew"]["a"]
                except tdserve.StoreNotFoundError:
                    continue
                except tdserve.TDServeError as error:
                    failures.append(f"{type(error).__name__}: {error}")
                else:
                    num_reads[0] += 1
                    if not (found == found.flatten()[0]).all():
                        failures.append("a mixture")

    threads = [threading.Thread(target=read, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    with server.client(transport="gloo", timeout_s=20.0) as client:
        for number in range(NUM_ROUNDS):
            shape = (5 + number % 3, 3 + number % 2)
            td = TensorDict({"a": torch.full(shape, number, dtype=DTYPES[number % 3])}, [shape[0]])
            client.init_remote(td, "anew")
            if number % 2:
                client["anew"]["a"]  # some are read before they go
            client.delete("anew")
    is_over.set()
    for thread in threads:
        thread.join()
    assert failures == []
    assert num_reads[0] > 0
