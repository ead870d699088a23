"""``tdserve get`` and ``tdserve put``: content comes out of a file as it went in."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tensordict import NonTensorData, NonTensorStack, TensorDict

import tdserve
from tdserve.cli.shell.exit_codes import CONFLICT, FAILED, NO_ANSWER, NOT_FOUND
from tdserve.exports import keyed_columns, store_export
from tests.integration.shell import Shell

pytestmark = pytest.mark.integration

ENDINGS = (".npz", ".safetensors", ".h5", ".pt", "")
NUM_ROWS = 300


def make_content() -> TensorDict:
    """Tensors of several dtypes, nested."""
    number = torch.arange(NUM_ROWS)
    return TensorDict(
        {
            "obs": {"image": (number[:, None, None] + torch.zeros(2, 3)).to(torch.uint8), "half": number.half()},
            "done": number % 3 == 0,
            "step": number,
        },
        [NUM_ROWS],
    )


def check_equal(found: Any, expected: TensorDict) -> None:
    """Fails unless keys, dtypes and values are equal."""
    assert set(found.keys(True, True)) == set(expected.keys(True, True))
    for key in expected.keys(True, True):
        assert found[key].dtype == expected[key].dtype
        assert torch.equal(found[key], expected[key])


@pytest.mark.slow
@pytest.mark.parametrize("ending", ENDINGS)
def test_file_when_got_and_put_then_the_same_store(
    client: tdserve.Client, shell: Shell, tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_export, "PIECE_NBYTES", 1000)  # many pieces
    content = make_content()
    client.init_remote(content, "store")
    path = tmp_path / f"file{ending}"
    (line,) = shell.lines("get", "store", str(path))
    assert line.startswith(f"{path}: ")
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    assert shell.json("put", str(path), "copy")["num_rows"] == NUM_ROWS
    check_equal(client["copy"][...], content)


@pytest.mark.slow
@pytest.mark.parametrize("ending", ENDINGS)
def test_file_when_of_a_table_or_weights_then_rows_or_the_newest_version(
    client: tdserve.Client, shell: Shell, tmp_path: Path, ending: str
) -> None:
    content = make_content()
    client.create_replay("table", like=content[0], capacity=1000).extend(content)
    shell.lines("get", "table", str(tmp_path / f"table{ending}"))
    shell.lines("put", str(tmp_path / f"table{ending}"), "rows")
    check_equal(client["rows"][...], content)
    assert shell.json("info", "table")["samples"] == 0
    weights = [TensorDict({"a": {"w": torch.full((3, 2), float(n))}, "b": torch.full((5,), n)}, []) for n in range(2)]
    versions = [client.publish("policy", each) for each in weights]
    for number, options in ((1, ()), (0, ("--version", str(versions[0])))):
        shell.lines("get", "policy", str(tmp_path / f"policy{ending}"), "--force", *options)
        shell.lines("put", str(tmp_path / f"policy{ending}"), "whole", "--force")
        check_equal(client["whole"][...], weights[number])
    missing = shell.error(NOT_FOUND, "get", "policy", str(tmp_path / "missing"), "--version", "99")
    assert f"99 is not kept; kept now: {versions[0]}, {versions[1]}" in missing


@pytest.mark.slow
@pytest.mark.parametrize("ending", ENDINGS)
def test_file_when_of_an_empty_table_then_no_rows_of_its_structure(
    client: tdserve.Client, shell: Shell, tmp_path: Path, ending: str
) -> None:
    content = make_content()
    client.create_queue("queue", like=content[0], max_size=1000)
    path = str(tmp_path / f"empty{ending}")
    shell.lines("get", "queue", path)
    shell.lines("put", path, "copy")
    check_equal(client["copy"][...], content[:0])
    assert shell.json("info", "copy")["num_rows"] == 0
    shell.lines("put", path, "queue")
    assert len(client["queue"]) == 0


def test_files_when_read_by_their_own_libraries_then_as_stored(
    client: tdserve.Client, shell: Shell, tmp_path: Path
) -> None:
    content = make_content()
    client.init_remote(content, "store")
    for ending in ENDINGS:
        shell.lines("get", "store", str(tmp_path / f"file{ending}"))
    image = content["obs", "image"]
    assert np.array_equal(np.load(tmp_path / "file.npz")["obs/image"], image.numpy())
    assert torch.equal(load_file(tmp_path / "file.safetensors")["obs/image"], image)
    with h5py.File(tmp_path / "file.h5") as file:
        assert np.array_equal(file["obs/image"][()], image.numpy())
    assert torch.equal(torch.load(tmp_path / "file.pt", weights_only=True)["obs"]["image"], image)
    check_equal(TensorDict.load_memmap(tmp_path / "file"), content)


def test_npy_when_one_key_is_chosen_then_written_and_read_by_the_name_of_the_file(
    client: tdserve.Client, shell: Shell, tmp_path: Path
) -> None:
    content = make_content()
    client.init_remote(content, "store")
    path = str(tmp_path / "image.npy")
    assert "choose one by key (--key" in shell.error(1, "get", "store", path)
    shell.lines("get", "store", path, "--key", "obs/image")
    assert np.array_equal(np.load(path), content["obs", "image"].numpy())
    assert shell.json("put", path, "copy")["num_rows"] == NUM_ROWS
    assert torch.equal(client["copy"][...]["image"], content["obs", "image"])
    table = client.create_replay("images", like=TensorDict({"image": content["obs", "image"][0]}, []), capacity=1000)
    assert shell.json("put", path, "images")["num_appended"] == len(table) == NUM_ROWS
    assert torch.equal(table[:]["image"], content["obs", "image"])
    columns = np.asfortranarray(np.arange(12.0).reshape(3, 4))
    for name, array in (("columns", columns), ("empty", np.zeros((0, 3))), ("number", np.array(2.5))):
        np.save(tmp_path / f"{name}.npy", array)
        shell.lines("put", str(tmp_path / f"{name}.npy"), name)
        assert np.array_equal(client[name][...][name].numpy(), array)


def test_npy_when_it_is_pickled_or_cut_or_something_else_then_refused_in_one_line(shell: Shell, tmp_path: Path) -> None:
    np.save(tmp_path / "pickled.npy", np.array([{}]), allow_pickle=True)
    np.save(tmp_path / "cut.npy", np.zeros(1000))
    (tmp_path / "cut.npy").write_bytes((tmp_path / "cut.npy").read_bytes()[:500])
    (tmp_path / "text.npy").write_text("nothing of NumPy")
    reasons = {
        "pickled": "which would be unpickled",
        "cut": "ends early",
        "text": "no array of np.save",
        "absent": "no such",
    }
    for name, reason in reasons.items():
        assert reason in shell.error(1, "put", str(tmp_path / f"{name}.npy"), "store")


@pytest.mark.slow
def test_values_when_they_are_texts_then_kept_where_the_format_has_them(
    client: tdserve.Client, shell: Shell, tmp_path: Path
) -> None:
    texts = [f"row {number}" for number in range(4)]
    client.init_remote(TensorDict({"x": torch.arange(4), "text": NonTensorStack(*texts)}, [4]), "store")
    for ending in (".npz", ".h5", ".pt", ""):
        shell.lines("get", "store", str(tmp_path / f"file{ending}"))
        shell.lines("put", str(tmp_path / f"file{ending}"), "copy", "--force")
        assert client["copy"][...]["text"] == texts
    assert "'text' in a file of safetensors" in shell.error(1, "get", "store", str(tmp_path / "file.safetensors"))
    shell.lines("get", "store", str(tmp_path / "file.safetensors"), "--key", "x")
    assert list(load_file(tmp_path / "file.safetensors")) == ["x"]


def test_get_when_a_file_exists_then_refused_without_force(
    client: tdserve.Client, shell: Shell, tmp_path: Path
) -> None:
    client.init_remote(make_content(), "store")
    path = tmp_path / "file.npz"
    path.write_text("mine")
    assert "--force" in shell.error(CONFLICT, "get", "store", str(path))
    assert path.read_text() == "mine"
    assert "there is no store" in shell.error(NOT_FOUND, "get", "nothing", str(path), "--force")
    assert "no key 'nothing'" in shell.error(NOT_FOUND, "get", "store", str(path), "--force", "--key", "nothing")
    assert path.read_text() == "mine"
    assert [each.name for each in tmp_path.iterdir()] == ["file.npz"]
    shell.lines("get", "store", str(path), "--force")
    assert len(np.load(path)["step"]) == NUM_ROWS


def test_get_when_a_folder_has_other_files_then_they_stay_even_with_force(
    client: tdserve.Client, shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.memmap(make_content(), "store")
    (tmp_path / "precious" / "sub").mkdir(parents=True)
    (tmp_path / "precious" / "sub" / "thesis").write_text("years of work")
    monkeypatch.chdir(tmp_path)
    for target in ("precious", str(tmp_path / "precious"), ".", ".."):
        assert "other files" in shell.error(1, "get", "store", target, "--force")
    shell.lines("get", "store", "made")
    (tmp_path / "made" / "notes.txt").write_text("mine")
    assert "other files" in shell.error(1, "get", "store", "made", "--force")
    (tmp_path / "made" / "notes.txt").unlink()
    shell.lines("get", "store", "made", "--force")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made", "precious"]
    assert (tmp_path / "precious" / "sub" / "thesis").read_text() == "years of work"


def test_put_when_a_store_exists_then_refused_without_force(
    client: tdserve.Client, shell: Shell, tmp_path: Path
) -> None:
    client.init_remote(TensorDict({"a": torch.arange(2)}, [2]), "store")
    np.savez(tmp_path / "file.npz", b=np.arange(3))
    assert "put --force" in shell.error(CONFLICT, "put", str(tmp_path / "file.npz"), "store")
    assert list(client["store"].keys()) == ["a"]
    shell.lines("put", str(tmp_path / "file.npz"), "store", "--force")
    assert list(client["store"].keys()) == ["b"]


def test_put_when_the_name_has_no_format_then_lists_them(shell: Shell, tmp_path: Path) -> None:
    assert ".safetensors" in shell.error(1, "put", str(tmp_path / "file.csv"), "store")
    assert "no such file" in shell.error(1, "put", str(tmp_path / "file.safetensors"), "store")
    assert "no such file or folder" in shell.error(1, "put", str(tmp_path / "folder"), "store")


class Trap:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self._path),))


def test_put_when_a_file_would_run_code_then_refused(shell: Shell, tmp_path: Path) -> None:
    trap = Trap(tmp_path / "sprung")
    torch.save({"a": torch.arange(3), "b": trap}, tmp_path / "file.pt")
    assert "other objects than tensors" in shell.error(1, "put", str(tmp_path / "file.pt"), "store")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(trap))
    torch.save({"a": torch.arange(3)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    for name in ("plain.pt", "old.pt"):
        shown = shell.error(1, "put", str(tmp_path / name), "store")
        assert "no zip file as torch.save writes it" in shown
        assert "torch.save a dict of its tensors" in shown
    np.savez(tmp_path / "file.npz", a=np.array([trap], object))
    assert "unpickled" in shell.error(1, "put", str(tmp_path / "file.npz"), "store")
    TensorDict({"a": torch.arange(3), "b": NonTensorData(1j, batch_size=[3])}, [3]).memmap(tmp_path / "folder")
    (pickled,) = [file for file in (tmp_path / "folder").rglob("*") if file.suffix in (".pickle", ".pkl")]
    pickled.write_bytes(pickle.dumps(trap))
    assert "pickled" in shell.error(1, "put", str(tmp_path / "folder"), "store")
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("ending", [".safetensors", ".h5", ".pt", ".npz"])
def test_put_when_the_file_is_garbage_then_one_line(shell: Shell, tmp_path: Path, ending: str) -> None:
    (tmp_path / f"file{ending}").write_bytes(os.urandom(1000))
    assert "invalid path" in shell.error(1, "put", str(tmp_path / f"file{ending}"), "store")


@pytest.mark.slow
@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("key", ["../out", "a/b", "..", "/abs"])
def test_get_when_a_key_would_leave_the_folder_then_nothing_is_written(
    client: tdserve.Client, shell: Shell, tmp_path: Path, ending: str, key: str
) -> None:
    client.create_replay("table", like=TensorDict({key: torch.zeros(1)}, []), capacity=3).extend(
        TensorDict({key: torch.zeros(3, 1)}, [3])
    )
    path = tmp_path / "folder" / f"file{ending}"
    path.parent.mkdir()
    if ending == ".pt":
        shell.lines("get", "table", str(path))
        assert list(torch.load(path, weights_only=True)) == [key]
    else:
        assert "invalid key" in shell.error(1, "get", "table", str(path))
        assert list(path.parent.iterdir()) == []
    assert [each.name for each in tmp_path.iterdir()] == ["folder"]


@pytest.mark.slow
@pytest.mark.parametrize("is_queue", [False, True])
def test_put_when_the_store_is_a_table_then_rows_are_appended(
    client: tdserve.Client, shell: Shell, tmp_path: Path, is_queue: bool
) -> None:
    content = make_content()
    row = content[0]
    made = client.create_queue("table", row, max_size=900) if is_queue else client.create_replay("table", row, 900)
    made.extend(content[:5])
    client.init_remote(content, "source")
    shell.lines("get", "source", str(tmp_path / "file.npz"))
    (line,) = shell.lines("put", str(tmp_path / "file.npz"), "table")
    assert line.startswith(f"table: {NUM_ROWS} rows appended, {NUM_ROWS + 5} of 900 rows now")
    found = shell.json("put", str(tmp_path / "file.npz"), "table")
    assert (found["num_appended"], found["num_rows"]) == (NUM_ROWS, 2 * NUM_ROWS + 5)
    check_equal(client["table"][...], TensorDict.cat([content[:5], content, content]))


def test_put_when_rows_do_not_fit_the_table_then_nothing_is_appended(
    client: tdserve.Client, shell: Shell, tmp_path: Path
) -> None:
    table = client.create_replay("table", like=TensorDict({"a": torch.zeros(2), "b": torch.tensor(0)}, []), capacity=9)
    np.savez(tmp_path / "short.npz", a=np.zeros((3, 2), np.float32))
    assert "key 'b': expected a column" in shell.error(FAILED, "put", str(tmp_path / "short.npz"), "table")
    np.savez(tmp_path / "wide.npz", a=np.zeros((3, 4), np.float32), b=np.arange(3))
    assert "key 'a': expected" in shell.error(FAILED, "put", str(tmp_path / "wide.npz"), "table")
    np.savez(tmp_path / "scalar.npz", a=np.float32(1))
    assert "no common first dimension" in shell.error(FAILED, "put", str(tmp_path / "scalar.npz"), "table")
    assert len(table) == 0
    np.savez(tmp_path / "fits.npz", a=np.zeros((3, 2)), b=np.arange(3))
    shell.lines("put", str(tmp_path / "fits.npz"), "table", "--force")
    assert shell.json("info", "table")["kind"] == "tensordict"


def test_put_when_a_later_piece_finds_no_room_then_the_rows_before_it_are_counted(
    client: tdserve.Client, shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tdserve.cli.files.put.CALL_TIMEOUT_S", 0.3)
    client.create_queue("queue", like=TensorDict({"a": torch.tensor(0)}, []), max_size=4)
    np.savez(tmp_path / "file.npz", a=np.arange(10))
    out, err = shell.run(NO_ANSWER, "put", str(tmp_path / "file.npz"), "queue")
    assert (out, len(client["queue"])) == ("", 4)
    assert err.startswith("aborted: 4 rows were appended to queue\n")


@pytest.mark.slow
@pytest.mark.parametrize("ending", [".npz", ".h5", ".pt", ""])
def test_get_when_a_keyed_store_has_a_structure_then_rows_with_their_keys(
    client: tdserve.Client, shell: Shell, tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keyed_columns, "PIECE_NBYTES", 1000)  # many pieces
    content = make_content()
    names = [f"episode/{number:03}" for number in range(NUM_ROWS)]
    client.create_kv("entries", like=content[0]).put(names, content)
    shell.lines("get", "entries", str(tmp_path / f"file{ending}"))
    assert shell.json("put", str(tmp_path / f"file{ending}"), "rows")["num_rows"] == NUM_ROWS
    found = client["rows"][...]
    assert found["key"] == names
    check_equal(found.exclude("key"), content)
    missing = shell.error(NOT_FOUND, "get", "entries", str(tmp_path / f"none{ending}"), "--key", "nothing")
    assert "'nothing'" in missing


def test_get_when_a_keyed_store_has_tensors_then_a_column_of_them(
    client: tdserve.Client, shell: Shell, tmp_path: Path
) -> None:
    client.create_kv("tensors", like=torch.zeros(2)).put(["b", "a"], torch.tensor([[3.0, 4.0], [1.0, 2.0]]))
    shell.lines("get", "tensors", str(tmp_path / "file.pt"))
    found = torch.load(tmp_path / "file.pt", weights_only=True)
    assert (found["key"], found["tensor"].tolist()) == (["a", "b"], [[1.0, 2.0], [3.0, 4.0]])
    shell.lines("get", "tensors", str(tmp_path / "file.safetensors"), "--key", "tensor")
    assert load_file(tmp_path / "file.safetensors")["tensor"].tolist() == [[1.0, 2.0], [3.0, 4.0]]


def test_get_when_entries_of_a_keyed_store_differ_then_each_is_at_its_key(
    client: tdserve.Client, shell: Shell, tmp_path: Path
) -> None:
    kv = client.create_kv("entries")
    kv["prompt/7"] = {"text": "What is a seqlock?", "tries": 3}
    kv["logits/7"] = torch.arange(4.0)
    kv["state"] = TensorDict({"obs": torch.ones(2, 3), "next": {"done": torch.tensor(True)}}, [])
    shell.lines("get", "entries", str(tmp_path / "file.pt"))
    found = torch.load(tmp_path / "file.pt", weights_only=True)
    assert found["prompt"]["7"] == {"text": "What is a seqlock?", "tries": 3}
    assert torch.equal(found["logits"]["7"], torch.arange(4.0))
    assert torch.equal(found["state"]["obs"], torch.ones(2, 3))
    assert found["state"]["next"]["done"]
    assert "'prompt/7'" in shell.error(FAILED, "get", "entries", str(tmp_path / "file.npz"))
    shell.lines("get", "entries", str(tmp_path / "file.npz"), "--key", "logits", "--key", "state")
    assert sorted(np.load(tmp_path / "file.npz")) == ["logits/7", "state/next/done", "state/obs"]
    shell.lines("get", "entries", str(tmp_path / "folder"))
    assert TensorDict.load_memmap(tmp_path / "folder")["prompt", "7"]["tries"] == 3
    assert "'nothing'" in shell.error(NOT_FOUND, "get", "entries", str(tmp_path / "none.pt"), "--key", "nothing")
    kv["state/obs"] = "the same place"
    assert "two entries have 'state/obs'" in shell.error(FAILED, "get", "entries", str(tmp_path / "none.pt"))
    kv.delete("state/obs")
    kv["logits"] = torch.zeros(1)
    assert "below the entry 'logits'" in shell.error(FAILED, "get", "entries", str(tmp_path / "none.pt"))
    assert not (tmp_path / "none.pt").exists()
