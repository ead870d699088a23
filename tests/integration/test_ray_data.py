"""Stores and folders as sources of Ray Data: the released package, whose worker processes read them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict

import tdserve

ray = pytest.importorskip("ray")
pytest.importorskip("pandas")
pytest.importorskip("pyarrow")
pytest.importorskip("ray.data")

from tdserve.ray_data import MemmapDatasource, TDServeDatasource  # noqa: E402

pytestmark = [pytest.mark.integration, pytest.mark.full, pytest.mark.filterwarnings("ignore")]

NUM_ROWS = 100


def make_rows() -> TensorDict:
    """Rows of all kinds of leaves."""
    number = torch.arange(NUM_ROWS)
    return TensorDict(
        {
            "obs": torch.stack([number, -number], 1).half(),
            "weight": number.bfloat16(),
            "next": {"number": number.clone()},
            "text": NonTensorStack(*[f"row {n}" for n in range(NUM_ROWS)]),
            "task": "all",
            "chat": NonTensorStack(*[[{"role": "user", "turn": n}] for n in range(NUM_ROWS)]),
            "ragged": torch.nested.nested_tensor([torch.full((n % 3,), n) for n in number], layout=torch.jagged),
        },
        [NUM_ROWS],
    )


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """Ray on this machine."""
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    yield
    ray.shutdown()


def take(source: Any, **options: Any) -> list[dict[str, Any]]:
    """Returns all rows, in the order of their numbers."""
    found = ray.data.read_datasource(source, **options).take_all()
    return sorted(found, key=lambda row: row["next/number"])


@pytest.mark.parametrize("transport", ["gloo", "shm"])
@pytest.mark.parametrize("num_blocks", [1, 7])
def test_store_when_read_by_tasks_then_every_row_once(
    server: tdserve.Server, client: tdserve.Client, name: str, transport: str, num_blocks: int
) -> None:
    client.memmap(make_rows(), name)
    source = TDServeDatasource(name, address=server.address, transport=transport)
    assert len(source.get_read_tasks(num_blocks)) == num_blocks
    assert source.estimate_inmemory_data_size() == client.describe(name).nbytes
    rows = take(source, override_num_blocks=num_blocks)
    assert [row["next/number"] for row in rows] == list(range(NUM_ROWS))
    for n, row in enumerate(rows):
        assert (row["obs"].tolist(), row["obs"].dtype) == ([n, -n], np.float16)
        assert (row["weight"], row["text"], row["task"]) == (n, f"row {n}", "all")
        assert row["chat"] == [{"role": "user", "turn": n}]
        assert row["ragged"].tolist() == [n] * (n % 3)


def test_source_when_keys_are_given_then_only_these_columns(
    server: tdserve.Server, client: tdserve.Client, name: str
) -> None:
    client.memmap(make_rows(), name)
    source = TDServeDatasource(name, address=server.address, keys=["text", ("next", "number")])
    assert set(ray.data.read_datasource(source).schema().names) == {"text", "next/number"}
    with pytest.raises(KeyError):
        TDServeDatasource(name, address=server.address, keys=["none"])


def test_table_when_read_then_its_live_rows(server: tdserve.Server, client: tdserve.Client, name: str) -> None:
    rows = make_rows().select("obs", "next")
    table = client.create_replay(name, rows[0], 2 * NUM_ROWS)
    source = TDServeDatasource(name, address=server.address)
    assert source.get_read_tasks(3) == []
    table.extend(rows[:30])
    found = take(TDServeDatasource(name, address=server.address, keys=["next"]), override_num_blocks=3)
    assert found == [{"next/number": n} for n in range(30)]


def test_folder_when_read_then_no_server_is_needed(tmp_path: Path) -> None:
    make_rows().select("obs", "next").memmap(tmp_path / "rows")
    source = MemmapDatasource(tmp_path / "rows")
    assert [row["next/number"] for row in take(source, override_num_blocks=4)] == list(range(NUM_ROWS))
    TensorDict({"x": torch.zeros(2)}, []).memmap(tmp_path / "one")
    with pytest.raises(tdserve.InvalidRequestError, match="no rows"):
        MemmapDatasource(tmp_path / "one")


def test_store_when_it_has_no_rows_or_is_absent_then_error(
    server: tdserve.Server, client: tdserve.Client, name: str
) -> None:
    with pytest.raises(tdserve.StoreNotFoundError):
        TDServeDatasource(name, address=server.address)
    client.memmap(TensorDict({"x": torch.zeros(2)}, []), name)
    with pytest.raises(tdserve.InvalidRequestError, match="no rows"):
        TDServeDatasource(name, address=server.address)


def test_source_when_two_keys_would_be_one_column_then_refused_by_both(server: tdserve.Server) -> None:
    with server.client() as client:
        client.init_remote(TensorDict({"a/b": torch.arange(4), "a": {"b": torch.arange(4) + 100}}, [4]), "one column")
    with pytest.raises(tdserve.InvalidRequestError, match=r"\('a/b',\) and \('a', 'b'\)"):
        TDServeDatasource("one column", address=server.address)
    assert TDServeDatasource("one column", address=server.address, keys=["a/b"]) is not None
