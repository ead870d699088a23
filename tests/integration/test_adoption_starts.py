"""Folders that tensordict has written and a server has adopted: restarts, rights, and commands."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.cli.main import main
from tests.integration.adopted import content, loaded
from tests.integration.conftest import FreshServer
from tests.processes import ready_worker, wait_for
from tests.sameness import difference

pytestmark = pytest.mark.integration


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What the user has."""
    content().memmap(tmp_path / "data")
    return tmp_path / "data"


# ------------------------------------------------------------------- restarts


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [pytest.param(1, marks=pytest.mark.full), 3])
def test_restart_when_adopted_then_there_again(fresh_server: FreshServer, folder: Path, num_workers: int) -> None:
    server = fresh_server(num_workers=num_workers)
    with server.client() as client:
        client.adopt(folder, "rw").set_at_("x", torch.full((3,), 4.0), 0)
    server.shutdown()
    again = fresh_server(Path(server.config.root), num_workers=num_workers)
    clients = [again.client(transport=transport) for transport in ("gloo", "shm", "gloo", "gloo")]
    for client in clients:
        store = client["rw"]
        assert (store["x"][0] == 4).all()
        assert store["text"] == content()["text"]
        store.set_at_("n", TensorDict({"y/z": torch.tensor(5), "empty": torch.zeros(0)}), 1)
        assert loaded(folder)["n", "y/z"][1] == 5
        client.close()


def _vanish(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))


def _truncate(folder: Path) -> None:
    os.truncate(folder / "n" / "y%2Fz.memmap", 8)


def _reshape(folder: Path) -> None:
    shutil.rmtree(folder)
    content()[:3].memmap(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "said"),
    [(_vanish, "No such file"), (_truncate, r"48 bytes .*y/z.* 8 bytes"), (_reshape, r"\[6\].*\[3\]")],
)
def test_restart_when_the_folder_changed_then_data_loss_and_the_server_goes_on(
    fresh_server: FreshServer,
    folder: Path,
    damage: Callable[[Path], None],
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    server = fresh_server()
    with server.client() as client:
        client.adopt(folder, "adopted")
        client.memmap(content().select("x"), "own")
    server.shutdown()
    shutil.copytree(folder, folder.with_name("copy"))
    damage(folder)
    again = fresh_server(Path(server.config.root))
    with again.client(transport="gloo") as remote, again.client(transport="shm") as local:
        for client in (remote, local):
            for call in (client.describe, client.load_memmap, client.__getitem__):
                with pytest.raises(tdserve.CorruptDataError, match=said):
                    call("adopted")
            assert difference(content().select("x"), client.load_memmap("own")) is None
        assert remote.stores() == ["adopted", "own"]
        assert main(["ls", "--long", "--address", again.address]) == 0
        assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()[-2:]] == [
            ["adopted", "damaged"],
            ["own", "tensordict"],
        ]
        remote.delete("adopted")
        assert remote.stores() == ["own"]
        assert difference(loaded(folder.with_name("copy")), local.adopt(folder.with_name("copy"), "adopted")[:]) is None


@pytest.mark.slow
def test_folder_when_cut_short_while_it_is_served_then_data_loss_and_the_server_goes_on(
    fresh_server: FreshServer, tmp_path: Path
) -> None:
    TensorDict({"x": torch.ones(64, 4096), "y": torch.arange(64)}, [64]).memmap(tmp_path / "data")
    with fresh_server().client(transport="gloo", timeout_s=30.0) as client:
        store = client.adopt(tmp_path / "data", "adopted")
        assert (store[63]["x"] == 1).all()
        os.truncate(tmp_path / "data" / "x.memmap", 4096)
        with pytest.raises(tdserve.CorruptDataError, match="1048576 bytes at key 'x', found 4096 bytes"):
            store[63]  # which ended the data worker
        client.delete("adopted")
        client.memmap(content().select("x"), "own")


@pytest.mark.slow
def test_restart_when_the_folder_came_back_then_served_again(fresh_server: FreshServer, folder: Path) -> None:
    server = fresh_server()
    with server.client() as client:
        client.adopt(folder, "adopted")
    server.shutdown()
    _vanish(folder)
    with fresh_server(Path(server.config.root)).client(transport="gloo") as client:
        with pytest.raises(tdserve.CorruptDataError):
            client.load_memmap("adopted")
        folder.with_name("elsewhere").rename(folder)
        assert difference(loaded(folder), client.load_memmap("adopted")) is None


# ------------------------------------------------------------------- who may


@pytest.fixture
def strange_client(server: tdserve.Server, tmp_path: Path) -> Iterator[Callable[[tdserve.Server], tdserve.Client]]:
    """Makes clients that do not see a server's root."""
    made: list[tdserve.Client] = []

    def make(server: tdserve.Server) -> tdserve.Client:
        (tmp_path / "not the root").mkdir(exist_ok=True)
        made.append(server.client(root=str(tmp_path / "not the root")))
        return made[-1]

    yield make
    for client in made:
        client.close()


def test_adopt_when_the_client_does_not_share_the_root_then_refused_whatever_is_there(
    server: tdserve.Server, strange_client: Callable[[tdserve.Server], tdserve.Client], folder: Path
) -> None:
    client = strange_client(server)
    said = []
    for path in (folder, folder / "nothing", Path("/etc")):
        with pytest.raises(tdserve.NotSupportedError, match="--adoptable") as caught:
            client.adopt(path, "strange", read_only=True)
        said.append(str(caught.value).replace(str(path), ""))
    assert len(set(said)) == 1  # no word of what exists
    assert "strange" not in client


@pytest.mark.slow
def test_adopt_when_below_an_adoptable_folder_then_for_every_client(
    fresh_server: FreshServer, strange_client: Callable[[tdserve.Server], tdserve.Client], folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "open").mkdir()
    folder.rename(tmp_path / "open" / "data")
    content().memmap(tmp_path / "opener")
    server = fresh_server(adoptable=(str(tmp_path / "open"),))
    client = strange_client(server)
    assert difference(loaded(tmp_path / "open/data"), client.adopt(tmp_path / "open/data", "a").to_tensordict()) is None
    (tmp_path / "open" / "link").symlink_to(tmp_path / "opener")
    for path in ("opener", "open/../opener", "open/link", "."):
        with pytest.raises(tdserve.NotSupportedError, match="--adoptable"):
            client.adopt(tmp_path / path, "b")
    assert client.stores() == ["a"]


# ------------------------------------------------------------------- commands


def test_command_when_run_then_the_store_is_there(
    server: tdserve.Server, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    at = ["--address", server.address]
    assert main(["adopt", str(folder), "by command", "--read-only", *at]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"by command: {folder}, batch size [6]")
    assert said.endswith(", read-only\n")
    assert main(["adopt", str(folder), "by command", *at]) == 6
    assert "exists already" in capsys.readouterr().err
    assert main(["adopt", str(folder), "by command", "--read-only", "--exist-ok", "--json", *at]) == 0
    assert json.loads(capsys.readouterr().out)["adopted"] == str(folder)
    with server.client() as client:
        assert difference(loaded(folder), client.load_memmap("by command")) is None
        client.delete("by command")


@pytest.mark.slow
def test_start_when_folders_are_to_be_adopted_then_there_from_the_beginning(
    fresh_server: FreshServer, folder: Path
) -> None:
    server = fresh_server(adopt=(f"{folder}=data:ro",))
    for started in (server, None):
        if started is None:
            server.shutdown()
            started = fresh_server(Path(server.config.root), adopt=(f"{folder}=data:ro",))
        with started.client(transport="gloo") as client:
            assert client.describe("data").read_only
            assert difference(loaded(folder), client.load_memmap("data")) is None


def test_start_when_there_is_nothing_to_adopt_then_one_line_and_the_root_is_free(
    fresh_server: FreshServer, tmp_path: Path
) -> None:
    with pytest.raises(tdserve.InvalidRequestError, match=r"meta\.json"):
        fresh_server(tmp_path / "root", adopt=(f"{tmp_path}/nothing=data",))
    with fresh_server(tmp_path / "root").client(transport="gloo") as client:
        assert client.stores() == []


@pytest.mark.slow
@pytest.mark.parametrize("restarts", ["the server", "the data worker"])
def test_adoptable_when_a_symlink_leads_out_of_it_later_then_data_loss_and_nothing_private_is_touched(
    fresh_server: FreshServer, tmp_path: Path, restarts: str
) -> None:
    row = TensorDict({"x": torch.zeros(4)}, [4])
    row.memmap(tmp_path / "open" / "a" / "td")
    (row + 1234).memmap(tmp_path / "private" / "td")
    server = fresh_server(adoptable=(str(tmp_path / "open"),))
    with server.client(transport="gloo") as client:
        client.adopt(tmp_path / "open" / "a" / "td", "mine")
    (tmp_path / "open" / "a").rename(tmp_path / "open" / "old")
    (tmp_path / "open" / "a").symlink_to(tmp_path / "private")
    if restarts == "the server":
        server.shutdown()
        server = fresh_server(Path(server.config.root), adoptable=(str(tmp_path / "open"),))
    else:
        with server.client(transport="gloo") as client:
            worker = ready_worker(client)
            os.kill(worker["pid"], signal.SIGKILL)
            wait_for(lambda: client.stats()["workers"][0]["num_restarts"] > worker["num_restarts"], "its restart")
    for transport in ("gloo", "shm"):
        with server.client(transport=transport) as client:
            with pytest.raises(tdserve.CorruptDataError, match="symlink"):
                client.load_memmap("mine")
            with pytest.raises(tdserve.CorruptDataError, match="symlink"):
                client["mine"].set_at_("x", torch.zeros(()), 0)
    assert TensorDict.load_memmap(tmp_path / "private" / "td")["x"].tolist() == [1234.0] * 4
