"""``update_if_present``: the same program over a storage of TorchRL's and over a table, and several processes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tdserve

pytest.importorskip("torchrl")

from torchrl.data import (
    LazyTensorStorage,
    ReplayBuffer,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)

from tdserve.torchrl import TDServeStorage

pytestmark = pytest.mark.integration

MakeBuffer = Callable[..., Any]


def make_rows(*numbers: int) -> TensorDict:
    number = torch.tensor(numbers)
    return TensorDict({"obs": number.float(), "n": {"v": number, "x": torch.zeros(len(numbers), 2)}}, [len(numbers)])


def make_writer() -> TensorDictRoundRobinWriter:
    return TensorDictRoundRobinWriter(track_generations=True)


@pytest.fixture(params=["TorchRL", "table"])
def buffer(request: pytest.FixtureRequest, client: tdserve.Client, name: str) -> Any:
    """A buffer of six rows."""
    if request.param == "TorchRL" and client.transport == "shm":
        pytest.skip("TorchRL's storage has no transport")
    storage = LazyTensorStorage(6) if request.param == "TorchRL" else TDServeStorage(6, address=client, name=name)
    made = TensorDictReplayBuffer(storage=storage, writer=make_writer(), batch_size=6)
    made.extend(make_rows(0, 1, 2, 3, 4, 5))
    return made


def mask(result: Any) -> list[bool]:
    return list(result.updated.tolist())


def handle(buffer: Any, *numbers: int) -> dict[str, torch.Tensor]:
    """Returns the rows of these numbers as they are now."""
    index = torch.tensor(numbers)
    return {"index": index, "generation": buffer.writer.generations_of(index)}


def test_update_when_rows_were_overwritten_then_these_are_skipped(buffer: Any) -> None:
    sample = buffer.sample()
    known = {"index": sample["index"], "generation": sample["index_generation"]}
    assert (known["generation"] >= 0).all()
    buffer.extend(make_rows(10, 11))
    result = buffer.update_if_present(**known, patch={"obs": torch.full((6,), -1.0), ("n", "x"): torch.ones(6, 2)})
    expected = known["index"] >= 2
    assert torch.equal(result.updated, expected)
    assert (result.updated_count, result.stale_count) == (int(expected.sum()), 6 - int(expected.sum()))
    rows = buffer[:]
    assert rows["obs"][:2].tolist() == [10.0, 11.0]
    written = sorted(set(known["index"][expected].tolist()))
    assert (rows["obs"][written] == -1).all()
    assert (rows["n", "x"][written] == 1).all()
    again = buffer.update_if_present(**known, patch=TensorDict({"obs": torch.zeros(6)}, [6]))
    assert mask(again) == mask(result)  # a row that was updated is the same row


def test_update_when_a_row_was_never_written_then_is_stale(buffer: Any) -> None:
    known = handle(buffer, 1, 2)
    buffer.empty()
    assert buffer.writer.generations_of(torch.tensor([1])).tolist() == [-1] or len(buffer) == 0
    assert mask(buffer.update_if_present(**known, patch={"obs": torch.zeros(2)})) == [False, False]
    buffer.extend(make_rows(1, 2, 3))
    assert mask(buffer.update_if_present(**known, patch={"obs": torch.zeros(2)})) == [False, False]
    known["generation"] = torch.full((2,), -1)
    assert mask(buffer.update_if_present(**known, patch={"obs": torch.zeros(2)})) == [False, False]


@pytest.mark.parametrize("require_newer", [False, True])
def test_update_when_versions_are_given_then_older_ones_are_rejected(buffer: Any, require_newer: bool) -> None:
    known = handle(buffer, 0, 1, 2, 3, 3, 3)
    version = torch.tensor([5, 1, 1, 2, 7, 7])
    result = buffer.update_if_present(
        **known,
        patch={"obs": torch.arange(10.0, 16.0)},
        version_key=("n", "v"),
        version=version,
        require_newer=require_newer,
    )
    assert mask(result) == [True, not require_newer, False, False, False, True]
    assert result.version_rejected.tolist() == [not is_written for is_written in mask(result)]
    rows = buffer[:]
    assert rows["n", "v"].tolist() == [5, 1, 2, 7, 4, 5]
    assert rows["obs"].tolist() == [10.0, 1.0 if require_newer else 11.0, 2.0, 15.0, 4.0, 5.0]
    buffer.extend(make_rows(20))
    result = buffer.update_if_present(**known, patch={}, version_key=("n", "v"), version=9)
    assert (mask(result), result.stale_count) == ([False, True, True, False, False, True], 1)
    assert buffer[:]["n", "v"].tolist() == [20, 9, 9, 9, 4, 5]


@pytest.mark.parametrize(
    ("error", "arguments"),
    [
        (KeyError, {"patch": {"other": torch.zeros(2)}}),
        (ValueError, {"patch": {"obs": torch.zeros(2, dtype=torch.float64)}}),
        (ValueError, {"patch": {"obs": torch.zeros(3)}}),
        (ValueError, {"patch": {}, "version_key": ("n", "v")}),
        (ValueError, {"patch": {}, "version_key": "n.v", "version": 1}),
        (
            ValueError,
            {"patch": {("n", "v"): torch.zeros(2, dtype=torch.int64)}, "version_key": ("n", "v"), "version": 1},
        ),
        (ValueError, {"patch": {}, "version_key": ("n", "x"), "version": 1}),
        (ValueError, {"patch": {}, "version_key": ("n", "v"), "version": torch.ones(3)}),
        (ValueError, {"patch": {"obs": torch.zeros(2)}, "generation": torch.zeros(3, dtype=torch.int64)}),
    ],
)
def test_update_when_it_does_not_fit_then_the_error_is_of_one_class(
    buffer: Any, error: type[Exception], arguments: dict[str, Any]
) -> None:
    with pytest.raises(error):
        buffer.update_if_present(**{**handle(buffer, 1, 2), **arguments})
    assert buffer[:]["obs"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_update_when_the_writer_does_not_track_then_is_refused(client: tdserve.Client, name: str) -> None:
    buffer = ReplayBuffer(storage=TDServeStorage(4, address=client, name=name), batch_size=2)
    buffer.extend(make_rows(0, 1))
    assert "index_generation" not in buffer.sample(return_info=True)[1]
    with pytest.raises(RuntimeError, match=r"conditional.*track_generations"):
        buffer.update_if_present(index=torch.tensor([0]), generation=torch.tensor([1]), patch={"obs": torch.zeros(1)})


@pytest.mark.slow
def test_update_when_another_thread_overwrites_rows_then_those_are_skipped(client: tdserve.Client, name: str) -> None:
    storage = TDServeStorage(6, address=client, name=name)
    buffer = TensorDictReplayBuffer(storage=storage, writer=make_writer(), batch_size=6)
    buffer.extend(make_rows(0, 1, 2, 3, 4, 5))

    def write() -> None:
        for number in range(300):
            buffer.extend(make_rows(number, number))

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write)
        while not writing.done():
            sample = buffer.sample()
            known = {"index": sample["index"], "generation": sample["index_generation"]}
            marked = -1.0 - sample["n", "v"]
            buffer.update_if_present(**known, patch={"obs": marked, ("n", "x"): marked.unsqueeze(1).expand(6, 2)})
            rows = buffer[:]
            is_marked = rows["obs"] < 0
            assert torch.equal(rows["obs"], torch.where(is_marked, -1.0 - rows["n", "v"], rows["n", "v"]))
            assert torch.equal(rows["n", "x"], torch.where(is_marked, rows["obs"], 0.0).unsqueeze(1).expand(-1, 2))
        writing.result()


@pytest.mark.slow
def test_update_when_many_clients_race_then_the_highest_version_stays(client: tdserve.Client, name: str) -> None:
    buffers = [
        TensorDictReplayBuffer(storage=TDServeStorage(4, address=client, name=name), writer=make_writer(), batch_size=4)
        for _ in range(4)
    ]
    buffers[0].extend(make_rows(0, 0, 0, 0))
    known = handle(buffers[0], 0, 1, 2, 3)

    def write(worker: int) -> int:
        num_written = 0
        for round_number in range(10):
            version = 1 + 4 * round_number + worker
            patch = {"obs": torch.full((4,), float(version)), ("n", "x"): torch.full((4, 2), float(version))}
            result = buffers[worker].update_if_present(
                **known, patch=patch, version_key=("n", "v"), version=version, require_newer=True
            )
            assert result.stale_count == 0
            num_written += result.updated_count
        return num_written

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(write, range(4))) >= 16
    rows = buffers[0][:]
    assert rows["n", "v"].tolist() == [40] * 4
    assert rows["obs"].tolist() == [40.0] * 4
    assert (rows["n", "x"] == 40).all()
