"""Folders of every kind of store, opened by plain tensordict: what it reads is right, and what it lacks is listed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tests.conformance.kinds import KINDS

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")]


def plain(server: tdserve.Server, client: tdserve.Client, name: str) -> Any:
    """Returns what tensordict itself reads while the server runs."""
    return TensorDict.load_memmap(Path(server.config.root) / client.describe(name).path / "rows", allow_pickle=False)


def leaves(td: Any) -> dict[str, torch.Tensor]:
    """Returns its tensors by dotted key."""
    return {".".join([key] if isinstance(key, str) else key): leaf for key, leaf in td.items(True, True)}


# Loading by plain tensordict runs __post_init__ before there is content.
OF_ITS_OWN = "lazy stack of instances that hold instances"


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != OF_ITS_OWN])
def test_folder_when_of_any_kind_then_shows_all_but_what_is_listed(
    server: tdserve.Server, client: tdserve.Client, name: str, kind: str
) -> None:
    client.memmap(KINDS[kind].make(), name)
    described = client.describe(name)
    shown = leaves(plain(server, client, name))
    stored = {".".join(path) for path, _ in (*described.spec.tensors, *described.spec.values)}
    assert stored - set(shown) == {*described.extra, *described.objects}
    assert set(shown) <= stored
    dense = {".".join(path): leaf.shape for path, leaf in described.spec.tensors}
    assert {key: tuple(leaf.shape) for key, leaf in shown.items()} == {key: dense[key] for key in shown}


def test_folder_when_rows_are_written_then_it_shows_them(
    server: tdserve.Server, client: tdserve.Client, name: str
) -> None:
    odd = {key: torch.zeros(3) for key in ("a b", "../x", "", "é%", "shape", "x" * 260)}
    td = TensorDict({"x": torch.zeros(3, 2), "t": "text", "odd": odd, "tiny": torch.zeros(3)}, [3])
    td["tiny"] = td["tiny"].to(torch.float8_e4m3fn)
    client.memmap(td, name).update_(
        TensorDict({"x": torch.ones(3, 2), "odd": {key: leaf + 1 for key, leaf in odd.items()}}, [3])
    )
    shown = leaves(plain(server, client, name))
    described = client.describe(name)
    assert set(described.extra) == {"tiny", "odd.shape", "odd." + "x" * 260}
    assert described.objects == ("t",)
    assert set(shown) == {"x", "odd.a b", "odd.../x", "odd.", "odd.é%"}
    assert all((leaf == 1).all() for leaf in shown.values())
