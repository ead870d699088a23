from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.base.deadline import Deadline
from tdserve.base.errors import InvalidRequestError, NotSupportedError
from tdserve.client.tensordicts.new_tensordict import adopt_folder
from tests.errors import raises


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of the user's."""
    TensorDict({"a": torch.arange(4)}, [4]).memmap(tmp_path / "data")
    return tmp_path / "data"


def adopt(client: tdserve.Client, path: Path | str, name: str) -> None:
    """Adopts a folder read-only, with a short timeout."""
    adopt_folder(client, path, name, read_only=True, exists_ok=False, deadline=Deadline.after(20.0))


def test_adopt_when_the_client_shares_the_root_then_over_either_transport(
    client: tdserve.Client, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    adopt(client, "../data", name)
    assert client[name]["a"].tolist() == [0, 1, 2, 3]
    assert client.stats()["transport"] == client.transport
    client.delete(name)


def test_adopt_when_the_client_sees_another_root_then_refused(
    server: tdserve.Server, name: str, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    for transport in ("auto", "gloo"):
        with (
            server.client(transport=transport, root=str(tmp_path / "other")) as client,
            pytest.raises(NotSupportedError, match="--adoptable"),
        ):
            adopt(client, folder, name)


def test_adopt_when_the_name_cannot_be_then_nothing_is_asked(client: tdserve.Client, folder: Path) -> None:
    with raises(InvalidRequestError, argument="store name"):
        adopt(client, folder, "a/b")
