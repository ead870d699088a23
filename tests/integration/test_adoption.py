"""Folders that tensordict has written, served where they lie."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict

import tdserve
from tests.errors import raises
from tests.integration.adopted import NUM_ROWS, bytes_of, content, loaded
from tests.sameness import difference

pytestmark = pytest.mark.integration


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What the user has."""
    content().memmap(tmp_path / "data")
    return tmp_path / "data"


@pytest.fixture(params=[False, True], ids=["writable", "read-only"])
def read_only(request: pytest.FixtureRequest) -> bool:
    """Both ways of adopting."""
    return bool(request.param)


# ------------------------------------------------------------------- reading


@pytest.mark.slow
def test_adopt_when_read_in_every_way_then_equal_to_what_tensordict_reads(
    client: tdserve.Client, name: str, folder: Path, read_only: bool
) -> None:
    before = bytes_of(folder)
    store = client.adopt(folder, name, read_only=read_only)
    expected = loaded(folder)
    assert difference(expected, client.load_memmap(name)) is None
    assert difference(expected, client.from_remote_init(name)) is None
    assert difference(expected, store.to_tensordict()) is None
    assert difference(expected[1:4], store[1:4]) is None
    assert difference(expected[[5, 0]], store[[5, 0]]) is None
    assert difference(expected[torch.arange(NUM_ROWS) % 2 == 0], store[torch.arange(NUM_ROWS) % 2 == 0]) is None
    assert difference(expected["shot"], store["shot"]) is None
    assert torch.equal(store["n", "y/z"], expected["n", "y/z"])
    assert torch.equal(store.get_at("x", 2), expected["x"][2])
    assert store["text"] == expected["text"]
    assert store["tag"] == {"k": [1, None]}
    assert list(store.keys()) == list(content().keys())
    assert set(client.keys(name, include_nested=True)) == set(expected.keys(include_nested=True))
    destination = expected.clone().zero_()
    assert client.from_remote_init(name, out=destination) is destination
    assert torch.equal(destination["x"], expected["x"])
    described = client.describe(name)
    assert (described.read_only, described.adopted, described.num_rows) == (read_only, str(folder), NUM_ROWS)
    assert described.batch_size == (NUM_ROWS,)
    assert bytes_of(folder) == before


def test_batches_when_read_only_then_each_row_is_seen_once_by_all_readers(
    client: tdserve.Client, name: str, folder: Path
) -> None:
    store = client.adopt(folder, name, read_only=True)
    sampler = tdserve.WithoutReplacement(seed=1)
    seen = [
        number
        for rank in range(2)
        for batch in store.batches(2, sampler=sampler, rank=rank, world_size=2, epoch=0)
        for number in batch["n", "y/z"].tolist()
    ]
    assert sorted(seen) == list(range(NUM_ROWS))


def test_store_folder_when_adopted_then_opens_with_plain_tensordict(
    client: tdserve.Client, name: str, folder: Path, server: tdserve.Server
) -> None:
    client.adopt(folder, name, read_only=True)
    rows = Path(server.config.root) / client.describe(name).path / "rows"
    assert difference(loaded(folder), loaded(rows)) is None


def test_map_when_adopted_then_the_users_own_pages(server: tdserve.Server, name: str, folder: Path) -> None:
    with server.client(transport="shm") as client:
        store = client.adopt(folder, name)
        assert difference(loaded(folder), store.map().copy()) is None
        store.map(writable=True)["x"][0, 0] = 77.0
        assert loaded(folder)["x"][0, 0] == 77
        store.map()["x"][0, 0] = 5.0  # stays here
        assert store["x"][0, 0] == 77
        client.delete(name)


# ------------------------------------------------------------------- writing


def test_write_when_adopted_then_the_users_files_change(client: tdserve.Client, name: str, folder: Path) -> None:
    store = client.adopt(folder, name)
    store.set_at_("x", torch.full((3,), 9.0), 1)
    store.set("n", {"y/z": torch.full((NUM_ROWS,), 7), "empty": torch.zeros(NUM_ROWS, 0)})
    changed = loaded(folder)
    assert (changed["x"][1] == 9).all()
    assert (changed["n", "y/z"] == 7).all()
    assert difference(changed, client.load_memmap(name)) is None
    store[2] = TensorDict({"x": torch.full((3,), 8.0)}, [])
    assert (loaded(folder)["x"][2] == 8).all()


def test_send_when_adopted_without_values_then_the_users_files_change(
    client: tdserve.Client, name: str, tmp_path: Path
) -> None:
    TensorDict({"x": torch.zeros(4, 2)}, [4]).memmap(tmp_path / "plain")
    client.adopt(tmp_path / "plain", name)
    assert client.send(TensorDict({"x": torch.ones(4, 2)}, [4]), name) == 2
    assert (loaded(tmp_path / "plain")["x"] == 1).all()


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "gloo"])
@pytest.mark.parametrize("write", ["send", "row", "value", "init_remote"])
def test_write_when_adopted_and_it_has_values_then_refused_and_nothing_changed(
    server: tdserve.Server, name: str, folder: Path, write: str, transport: str
) -> None:
    with server.client(transport=transport) as client:
        client.adopt(folder, name)
        before, version = bytes_of(folder), client.describe(name).version
        with pytest.raises(tdserve.NotSupportedError, match=rf"value .*{name}.*{folder}.*client\.memmap\("):
            WRITES[write](client, name)
        assert bytes_of(folder) == before
        assert client.describe(name).version == version
        assert difference(loaded(folder), client.load_memmap(name)) is None
        client.memmap(client[name].to_tensordict(), f"{name}-own")
        own = client[f"{name}-own"]
        own.set_at_("text", "other", 0)
        assert own["text"][0] == "other"
        client.delete(name)


WRITES: dict[str, Callable[[tdserve.Client, str], object]] = {
    "send": lambda client, name: client.send(client.load_memmap(name), name),
    "set_at_": lambda client, name: client[name].set_at_("x", torch.zeros(3), 0),
    "set": lambda client, name: client[name].set("x", torch.zeros(NUM_ROWS, 3)),
    "row": lambda client, name: client[name].__setitem__(0, client[name][1]),
    "key": lambda client, name: client[name].__setitem__("x", torch.zeros(NUM_ROWS, 3)),
    "value": lambda client, name: client[name].set_at_("text", "other", 0),
    "update_": lambda client, name: client[name].update_({"x": torch.zeros(NUM_ROWS, 3)}),
    "init_remote": lambda client, name: client.init_remote(client.load_memmap(name), name, exists_ok=True),
    "memmap": lambda client, name: client.memmap(client.load_memmap(name), name, exists_ok=True),
    "new key": lambda client, name: client[name].set("new", torch.zeros(NUM_ROWS)),
    "pop": lambda client, name: client[name].pop("x"),
    "rename_key_": lambda client, name: client[name].rename_key_("x", "w"),
    "lock_": lambda client, name: client[name].lock_(),
}


@pytest.mark.slow
@pytest.mark.parametrize("write", WRITES)
def test_write_when_read_only_then_refused_with_the_store_and_nothing_changed(
    client: tdserve.Client, name: str, folder: Path, write: str
) -> None:
    client.adopt(folder, name, read_only=True)
    before, version = bytes_of(folder), client.describe(name).version
    with pytest.raises(tdserve.ReadOnlyError, match=f"{name}.*read_only=True.*{folder}"):
        WRITES[write](client, name)
    assert bytes_of(folder) == before
    assert client.describe(name).version == version
    assert difference(loaded(folder), client.load_memmap(name)) is None


@pytest.mark.parametrize("change", ["new key", "pop", "rename_key_"])
def test_structure_when_adopted_then_stays_that_of_the_folder(
    client: tdserve.Client, name: str, folder: Path, change: str
) -> None:
    client.adopt(folder, name)
    before = bytes_of(folder)
    with pytest.raises(tdserve.NotSupportedError, match=str(folder)):
        WRITES[change](client, name)
    assert bytes_of(folder) == before
    assert difference(loaded(folder), client.load_memmap(name)) is None


def test_lock_when_adopted_then_the_folder_does_not_change(client: tdserve.Client, name: str, folder: Path) -> None:
    store = client.adopt(folder, name)
    before = bytes_of(folder)
    store.lock_()
    assert bytes_of(folder) == before
    with pytest.raises(RuntimeError):
        store.set("new", torch.zeros(NUM_ROWS))
    store.unlock_()
    store.set_at_("x", torch.full((3,), 9.0), 1)
    assert (loaded(folder)["x"][1] == 9).all()


def test_map_when_read_only_then_only_privately(server: tdserve.Server, name: str, folder: Path) -> None:
    with server.client(transport="shm") as client:
        store = client.adopt(folder, name, read_only=True)
        with raises(tdserve.ReadOnlyError, store=name):
            store.map(writable=True)
        store.map()["x"][0, 0] = 5.0
        assert loaded(folder)["x"][0, 0] == 0
        client.delete(name)


# ------------------------------------------------------------------- life


def test_delete_when_adopted_then_forgotten_and_the_files_stay(
    client: tdserve.Client, name: str, folder: Path, server: tdserve.Server
) -> None:
    before = bytes_of(folder)
    store = client.adopt(folder, name)
    path = Path(server.config.root) / client.describe(name).path
    client.delete(name)
    assert name not in client
    assert not path.exists()
    assert bytes_of(folder) == before
    with pytest.raises(tdserve.StoreNotFoundError):
        store["x"]
    assert difference(loaded(folder), client.adopt(folder, name).to_tensordict()) is None


def test_adopt_when_again_then_only_with_exists_ok_and_just_so(client: tdserve.Client, name: str, folder: Path) -> None:
    client.adopt(folder, name)
    with pytest.raises(tdserve.StoreExistsError):
        client.adopt(folder, name)
    assert client.adopt(folder / "../data", name, existsok=True).name == name
    with pytest.raises(tdserve.StoreExistsError, match="read_only=False"):
        client.adopt(folder, name, read_only=True, exists_ok=True)
    content().memmap(folder.parent / "other")
    with pytest.raises(tdserve.StoreExistsError, match=str(folder)):
        client.adopt(folder.parent / "other", name, exists_ok=True)


def test_adopt_when_two_stores_would_share_files_then_only_read_only(
    client: tdserve.Client, name: str, folder: Path
) -> None:
    client.adopt(folder, name, read_only=True)
    other = f"{name[:100]}-other"
    for path in (folder, folder / "n"):
        with pytest.raises(tdserve.StoreExistsError, match=f"{name}.*read_only=True"):
            client.adopt(path, other)
    assert torch.equal(client.adopt(folder / "n", other, read_only=True)["y/z"], torch.arange(NUM_ROWS))
    client.delete(other)


def test_adopt_when_the_path_is_relative_then_taken_from_the_client(
    client: tdserve.Client, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    (folder.parent / "link").symlink_to(folder)
    client.adopt("link", name)
    assert client.describe(name).adopted == str(folder)


def test_adopt_when_the_folder_is_the_servers_own_then_refused(
    client: tdserve.Client, name: str, server: tdserve.Server
) -> None:
    client.memmap(content().select("x"), name)
    root = Path(server.config.root)
    for path in (root, root / client.describe(name).path / "rows", root.parent):
        with raises(tdserve.InvalidRequestError, argument="path"):
            client.adopt(path, "mine", read_only=True)
    assert "mine" not in client


def test_adopt_when_it_cannot_be_then_typed_error_and_the_name_stays_free(
    client: tdserve.Client, name: str, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "plain").mkdir()
    (tmp_path / "a file").touch()
    for path in (tmp_path / "nothing", tmp_path / "plain", tmp_path / "a file"):
        with pytest.raises(tdserve.InvalidRequestError, match=r"meta\.json"):
            client.adopt(path, name)
    TensorDict({"p": torch.device("cpu"), "x": torch.zeros(2)}).memmap(tmp_path / "pickled")
    with pytest.raises(tdserve.NotSupportedError, match="pickled value at key 'p'"):
        client.adopt(tmp_path / "pickled", name)
    TensorDict({"q": LazyStackedTensorDict(*[TensorDict({"q": torch.ones(n)}) for n in (1, 2)])}).memmap(
        tmp_path / "lazy"
    )
    with pytest.raises(tdserve.NotSupportedError, match="at key 'q'"):
        client.adopt(tmp_path / "lazy", name)
    os.truncate(folder / "x.memmap", 70)
    with pytest.raises(tdserve.CorruptDataError, match="72 bytes at key 'x', found 70 bytes"):
        client.adopt(folder, name)
    broken = tmp_path / "broken"
    TensorDict({"a": torch.zeros(4, 2)}, [4]).memmap(broken)
    meta = broken / "meta.json"
    meta.write_text(json.dumps({**json.loads(meta.read_text()), "shape": [3]}))
    reason = rf"structure for store '{name}': in the folder {broken}, .*shape \(4, 2\).*batch size \(3,\)"
    with pytest.raises(tdserve.InvalidSpecError, match=reason):
        client.adopt(broken, name)
    assert name not in client
    assert name in client.memmap(content().select("x"), name).name


def test_adopt_when_values_are_many_then_all_are_kept(client: tdserve.Client, name: str, tmp_path: Path) -> None:
    texts = [f"{number}" * 50 for number in range(2000)]
    TensorDict({"t": NonTensorStack(*texts), "x": torch.arange(2000)}, [2000]).memmap(tmp_path / "many")
    store = client.adopt(tmp_path / "many", name, read_only=True)
    assert store["t"] == texts
    assert store[7]["t"] == texts[7]
