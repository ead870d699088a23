"""``tdserve get`` and ``tdserve put`` of chats and of rows that differ in shape."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from tensordict import NonTensorData, TensorDict, lazy_stack

import tdserve
from tdserve.cli.shell.exit_codes import FAILED
from tdserve.exports import store_export
from tests.integration.shell import Shell

pytestmark = pytest.mark.integration


def make_chats(sizes: list[int]) -> TensorDict:
    """Chats with token ids of these lengths."""
    rows = [
        TensorDict(
            {
                "tokens": {"ids": torch.arange(size), "logprobs": torch.ones(size, 2, dtype=torch.bfloat16)},
                "chat": NonTensorData([{"role": "user", "content": "ä" * size}]),
                "reward": torch.tensor(size / 2),
            }
        )
        for size in sizes
    ]
    return lazy_stack(rows)


SIZES = [3, 1, 1, 2, 2, 2, 5]  # so that some pieces, of two rows, have equal lengths


@pytest.fixture
def chats(client: tdserve.Client, monkeypatch: pytest.MonkeyPatch) -> tdserve.ReplayHandle:
    """A table of chats, which are exported in pieces of two rows."""
    table = client.create_replay("chats", like=make_chats([1, 2])[0], capacity=len(SIZES))
    table.extend(make_chats(SIZES))
    monkeypatch.setattr(store_export, "MAX_PIECE_ROWS", 2)
    return table


def test_jsonl_when_rows_differ_in_shape_then_a_line_for_each(
    chats: tdserve.ReplayHandle, shell: Shell, tmp_path: Path
) -> None:
    shell.lines("get", "chats", str(tmp_path / "chats.jsonl"))
    lines = (tmp_path / "chats.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [
        {
            "tokens": {"ids": list(range(size)), "logprobs": [[1.0, 1.0]] * size},
            "chat": [{"role": "user", "content": "ä" * size}],
            "reward": size / 2,
        }
        for size in SIZES
    ]
    assert "its rows differ in shape; write .jsonl or .pt" in shell.error(
        FAILED, "get", "chats", str(tmp_path / "a.npz")
    )


def test_pt_when_rows_differ_in_shape_then_put_again(
    chats: tdserve.ReplayHandle, client: tdserve.Client, shell: Shell, tmp_path: Path
) -> None:
    shell.lines("get", "chats", str(tmp_path / "chats.pt"))
    shell.lines("put", str(tmp_path / "chats.pt"), "again")
    found = client["again"]
    assert [row.tolist() for row in found["tokens", "ids"].unbind()] == [list(range(size)) for size in SIZES]
    assert found["tokens", "logprobs"].dtype == torch.bfloat16
    assert found[6]["chat"] == [{"role": "user", "content": "ä" * 5}]


def test_jsonl_when_there_are_no_rows_then_refused(client: tdserve.Client, shell: Shell, tmp_path: Path) -> None:
    client.init_remote(TensorDict({"x": torch.zeros(2)}), "one")
    assert "there are no rows" in shell.error(FAILED, "get", "one", str(tmp_path / "one.jsonl"))
    assert list(tmp_path.iterdir()) == []


def test_jsonl_when_put_then_as_it_was_without_any_package(
    chats: tdserve.ReplayHandle,
    client: tdserve.Client,
    shell: Shell,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    path = str(tmp_path / "chats.jsonl")
    shell.lines("get", "chats", path, "--key", "tokens/ids", "--key", "chat", "--key", "reward")
    shell.lines("put", path, "again")
    found = client["again"]
    assert [row.tolist() for row in found["tokens", "ids"].unbind()] == [list(range(size)) for size in SIZES]
    assert found["reward"].tolist() == [size / 2 for size in SIZES]
    assert found[6]["chat"] == [{"role": "user", "content": "ä" * 5}]
    queue = client.create_queue("queue", TensorDict({"reward": torch.tensor(0.0, dtype=torch.float64)}), 9)
    shell.lines("put", path, "queue", "--key", "reward")
    assert queue[:]["reward"].tolist() == found["reward"].tolist()
