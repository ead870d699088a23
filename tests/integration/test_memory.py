"""An idle learner costs no memory: writers wait, with an error that names the reason, and go on when rows are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

import tdserve
from tests.memory import read_private_bytes
from tests.processes import wait_for

pytestmark = pytest.mark.integration

LIMIT_BYTES = 1 << 20
VALUE_BYTES = 60_000
"""Such content is part of the request. Larger content travels apart, and is not held while its request waits."""


def rows(num_rows: int, num_characters: int) -> TensorDict:
    """Rows with a text each, which travels inside the request."""
    td = TensorDict({"x": torch.zeros(num_rows)}, [num_rows])
    return td.set("text", NonTensorStack(*["y" * num_characters] * num_rows))


@pytest.mark.slow
def test_writers_when_no_client_reads_then_the_server_holds_no_more_than_its_limit(tmp_path: Path) -> None:
    with (
        tdserve.Server(tmp_path / "root", memory_limit_bytes=LIMIT_BYTES) as server,
        server.client(transport="gloo") as client,
    ):
        queue = client.create_queue("queue", rows(1, 1)[0], 8)
        queue.extend(rows(8, 1))
        before_bytes = read_private_bytes(server.pid)
        row, handles = rows(1, VALUE_BYTES), [client.queue("queue") for _ in range(6)]
        futures = [handle.extend(row, return_early=True, timeout_s=6.0) for _ in range(60) for handle in handles]
        errors = [future.exception(30.0) for future in futures]
        assert {type(error) for error in errors} <= {tdserve.DeadlineExceededError, tdserve.ServerBusyError}
        refused = [error for error in errors if isinstance(error, tdserve.ServerBusyError)]
        assert refused
        assert refused[0].fields["limit"] in (LIMIT_BYTES, LIMIT_BYTES // 2)  # of all, or of one session
        # If waiting requests were held, whole and decoded, they would take 43 MB. Buffers of gRPC alone take 6 to 14
        # MB.
        assert read_private_bytes(server.pid) - before_bytes < 24 * LIMIT_BYTES
        assert len(queue) == 8


@pytest.mark.slow
def test_writers_when_the_server_has_no_memory_for_now_then_they_go_on_when_a_client_reads(tmp_path: Path) -> None:
    with (
        tdserve.Server(tmp_path / "root", memory_limit_bytes=LIMIT_BYTES) as server,
        server.client(transport="gloo") as client,
    ):
        queue = client.create_queue("queue", rows(1, 1)[0], 2)
        futures = [queue.extend(rows(1, VALUE_BYTES), return_early=True, timeout_s=30.0) for _ in range(30)]
        taken: list[Any] = []
        while len(taken) < 30:
            with queue.take(1, timeout_s=20.0) as found:
                taken.extend(found["text"])
        assert [len(future.result(30.0)) for future in futures] == [1] * 30
        assert [len(text) for text in taken] == [VALUE_BYTES] * 30
        wait_for(lambda: len(queue) == 0 or None, "an empty queue")


@pytest.mark.slow
def test_writer_when_no_client_reads_then_append_waits_and_its_error_names_the_cause(tmp_path: Path) -> None:
    with tdserve.Server(tmp_path / "root") as server, server.client(transport="gloo") as client:
        like = TensorDict({"x": torch.zeros(1_000)}, [])
        replay = client.create_replay("replay", like, 100, limiter=tdserve.Queue(10))
        writer = replay.writer(batch=5, max_bytes=200_000, timeout_s=0.5)

        def append_until_refused() -> None:
            for _ in range(1_000):
                writer.append(like)

        with pytest.raises(tdserve.DeadlineExceededError, match="'replay'") as caught:
            append_until_refused()
        assert "200000 bytes" in str(caught.value)
        num_appended = writer.num_appended
        assert num_appended <= 10 + 200_000 // 4_000
        replay.set_limiter(tdserve.MinSize(1))
        writer.close(timeout_s=20.0)
        assert writer.num_acknowledged == num_appended == len(replay)
