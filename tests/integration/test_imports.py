"""Imports of files into stores, by the command and in Python."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

import tdserve
from tdserve.cli.main import main
from tdserve.imports import import_store
from tests.errors import raises
from tests.integration.forked_clients import ForkedClients
from tests.processes import wait_for

pytestmark = pytest.mark.integration

NUM_ROWS = 300
LARGE_NBYTES = 160 << 20
ROOM_NBYTES = 96 << 20
"""Less than the file; see test_h5.py."""


@pytest.fixture(scope="module")
def forked_clients() -> Iterator[ForkedClients]:
    """Starts processes that import."""
    with ForkedClients("tests.integration.import_roles") as made:
        yield made


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An archive that has many pieces. Each row repeats one number."""
    path = tmp_path_factory.mktemp("npz") / "large.npz"
    number = (np.arange(LARGE_NBYTES >> 16) % 251).astype(np.uint8)
    np.savez(path, pixels=np.broadcast_to(number[:, None], (len(number), 1 << 16)), number=number)
    yield path
    path.unlink()


def make_columns() -> dict[str, Any]:
    """Arrays of several dtypes, by names with slashes."""
    number = np.arange(NUM_ROWS)
    return {
        "obs/image": (number[:, None, None] + np.zeros((2, 3))).astype(np.uint8),
        "obs/half": number.astype(np.float16),
        "done": number % 3 == 0,
        "step": number,
        "text": np.array([f"row {each}" for each in number]),
    }


def check_rows(store: Any) -> None:
    """Asserts that a store has the rows of ``make_columns``."""
    found = store.to_tensordict()
    assert found.batch_size == (NUM_ROWS,)
    for key, column in make_columns().items():
        entry = found[tuple(key.split("/"))]
        if key == "text":
            assert list(entry) == column.tolist()
        else:
            assert entry.numpy().dtype == column.dtype
            assert (entry.numpy() == column).all()


def write_h5(path: Path) -> None:
    with h5py.File(path, "w") as file:
        for key, column in make_columns().items():
            file[key] = column.tolist() if key == "text" else column
        ragged = file.create_dataset("ragged", (NUM_ROWS,), h5py.vlen_dtype(np.int32))
        for number in range(NUM_ROWS):
            ragged[number] = np.full(number % 4, number)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_when_imported_then_equal(client: tdserve.Client, name: str, tmp_path: Path, save: Any) -> None:
    save(tmp_path / "a.npz", **make_columns(), fortran=np.asfortranarray(np.arange(2 * NUM_ROWS).reshape(-1, 2)))
    seen: list[tuple[int, int]] = []
    store = import_store(client, "npz", tmp_path / "a.npz", name, on_progress=lambda *progress: seen.append(progress))
    check_rows(store)
    assert store["fortran"].tolist() == np.arange(2 * NUM_ROWS).reshape(-1, 2).tolist()
    assert seen == [(NUM_ROWS, NUM_ROWS)]


def test_hdf5_when_imported_then_equal(client: tdserve.Client, name: str, tmp_path: Path) -> None:
    write_h5(tmp_path / "a.h5")
    store = import_store(client, "hdf5", tmp_path / "a.h5", name)
    check_rows(store)
    expected = [[number] * (number % 4) for number in range(NUM_ROWS)]
    assert [row.tolist() for row in store["ragged"].unbind()] == expected


def test_arrays_when_of_several_lengths_then_refused_unless_chosen_or_without_rows(
    client: tdserve.Client, name: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.npz"
    columns: dict[str, Any] = {"obs/x": np.zeros((4, 2)), "obs/y": np.ones(4), "gamma": np.array(0.5)}
    np.savez(path, **columns)
    with pytest.raises(tdserve.InvalidRequestError, match=r"no common first dimension.*obs/x \[4, 2\].*gamma \[\]"):
        import_store(client, "npz", path, name)
    with pytest.raises(tdserve.InvalidRequestError, match=r"has no obs/z"):
        import_store(client, "npz", path, name, keys=["obs/z"])
    assert name not in client
    assert import_store(client, "npz", path, name, keys=["obs"]).batch_size == (4,)
    whole = import_store(client, "npz", path, name, has_rows=False, replaces=True).to_tensordict()
    assert whole.batch_size == ()
    assert whole["gamma"] == 0.5
    assert whole["obs", "y"].tolist() == [1.0] * 4


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"x": np.array([{}, {}])}, "Python objects"),
        ({"x": np.zeros(2, [("a", "f4")])}, "structured"),
        ({"x": np.zeros(2, "M8[s]")}, r"x.*view\('int64'\), or choose others by key \(--key"),
        ({"x": np.zeros(2), "x/y": np.zeros(2)}, "below the key"),
        ({"a.b": np.zeros(3), "": np.zeros(3)}, "an array in it has an empty name"),
        ({}, "no array"),
    ],
)
def test_npz_when_it_has_what_no_store_can_hold_then_refused(
    client: tdserve.Client, name: str, tmp_path: Path, content: dict[str, Any], message: str
) -> None:
    np.savez(tmp_path / "a.npz", **content)
    with pytest.raises((tdserve.InvalidRequestError, tdserve.NotSupportedError), match=message):
        import_store(client, "npz", tmp_path / "a.npz", name)
    assert name not in client


@pytest.mark.parametrize("dtype", [np.dtype([("a", "f4")]), h5py.vlen_dtype(h5py.string_dtype()), h5py.ref_dtype])
def test_hdf5_when_a_type_has_no_tensor_then_refused(
    client: tdserve.Client, name: str, tmp_path: Path, dtype: Any
) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", (2,), dtype)
    with pytest.raises(tdserve.InvalidRequestError, match="x has the type"):
        import_store(client, "hdf5", tmp_path / "a.h5", name)


def test_hdf5_when_a_link_leads_into_a_circle_or_nowhere_then_refused_by_its_name_unless_others_are_chosen(
    client: tdserve.Client, name: str, tmp_path: Path
) -> None:
    targets = {
        "g/up": (h5py.SoftLink("/"), r"g/up leads back to /,"),
        "g/h/up": (h5py.SoftLink("/g"), r"g/h/up leads back to /g,"),
        "none": (h5py.SoftLink("/nowhere"), "none is a link to /nowhere, where nothing is"),
        "self": (h5py.SoftLink("/self"), "self is a link to /self, where nothing is"),
        "far": (h5py.ExternalLink("absent.h5", "/x"), r"far is a link to /x in absent\.h5, where nothing is"),
    }
    for key, (target, message) in targets.items():
        with h5py.File(tmp_path / "a.h5", "w") as file:
            file["g/x"] = np.arange(4)
            file["y"] = h5py.SoftLink("/g/x")
            file[key] = target
        with pytest.raises(tdserve.InvalidRequestError, match=f"{message}.*--key"):
            import_store(client, "hdf5", tmp_path / "a.h5", name)
        with pytest.raises(tdserve.InvalidRequestError, match="has no z: g/x"):
            import_store(client, "hdf5", tmp_path / "a.h5", name, keys=["z"])
        assert name not in client
        store = import_store(client, "hdf5", tmp_path / "a.h5", name, keys=["g/x", "y"])
        assert store["g", "x"].tolist() == store["y"].tolist() == [0, 1, 2, 3]
        client.delete(name)


def test_hdf5_when_two_keys_are_links_to_one_group_then_both_have_its_arrays(
    client: tdserve.Client, name: str, tmp_path: Path
) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["g/x"] = np.arange(4)
        file["h"] = h5py.SoftLink("/g")
    store = import_store(client, "hdf5", tmp_path / "a.h5", name)
    assert store["g", "x"].tolist() == store["h", "x"].tolist() == [0, 1, 2, 3]


def test_npz_when_one_array_of_np_save_then_the_error_names_the_remedy(
    client: tdserve.Client, name: str, tmp_path: Path
) -> None:
    np.save(tmp_path / "a.npy", np.arange(4))
    with pytest.raises(tdserve.InvalidRequestError, match=r"one array \(\.npy\).*np\.savez"):
        import_store(client, "npz", tmp_path / "a.npy", name)


@pytest.mark.parametrize("kind", ["npz", "hdf5"])
def test_path_when_absent_or_another_format_then_error(
    client: tdserve.Client, name: str, tmp_path: Path, kind: str
) -> None:
    (tmp_path / "text").write_text("neither")
    for path, message in (("none", "none: there is no such file$"), ("text", "text: "), ("", "it is a folder")):
        with pytest.raises(tdserve.InvalidRequestError, match=message):
            import_store(client, kind, tmp_path / path, name)
    with raises(tdserve.InvalidRequestError, argument="split"):
        import_store(client, kind, tmp_path / "text", name, split="train")
    with pytest.raises(tdserve.InvalidRequestError, match=f"'csv' is not one of .*{kind}"):
        import_store(client, "csv", tmp_path / "text", name)


def test_store_when_it_exists_then_kept_unless_replaced_by_what_can_be_read(
    client: tdserve.Client, store: Any, name: str, tmp_path: Path
) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros(2))
    with pytest.raises(tdserve.StoreExistsError, match="--replace"):
        import_store(client, "npz", tmp_path / "a.npz", name)
    with pytest.raises(tdserve.InvalidRequestError):
        import_store(client, "npz", tmp_path / "none", name, replaces=True)
    with pytest.raises(tdserve.InvalidRequestError):
        import_store(client, "npz", tmp_path / "a.npz", name, keys=["y"], replaces=True)
    other = f"{name}-other"
    client.memmap(store.to_tensordict(), other)
    assert import_store(client, "npz", tmp_path / "a.npz", other, replaces=True)["x"].tolist() == [0.0, 0.0]
    client.delete(other)


@pytest.mark.slow
def test_file_when_damaged_behind_its_first_piece_then_error_and_nothing_is_left(
    client: tdserve.Client, name: str, tmp_path: Path
) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((40, 1 << 17)))
    with (tmp_path / "a.npz").open("r+b") as file:
        file.seek(30 << 20)
        file.write(b"x")
    seen: list[int] = []
    with pytest.raises(tdserve.CorruptDataError, match="CRC"):
        import_store(client, "npz", tmp_path / "a.npz", name, on_progress=lambda done, _: seen.append(done))
    assert seen == [16, 32]
    assert name not in client
    np.savez(tmp_path / "a.npz", x=np.zeros(2))
    import_store(client, "npz", tmp_path / "a.npz", name)


def import_if_free(client: tdserve.Client, path: Path, name: str) -> Any:
    """Imports numbers; returns None if the name is taken."""
    try:
        return import_store(client, "npz", path, name, keys=["number"])
    except tdserve.StoreExistsError:
        return None


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["gloo", "shm"])
def test_import_when_its_process_is_killed_then_nothing_is_left(
    server: tdserve.Server, forked_clients: ForkedClients, large: Path, transport: str
) -> None:
    name = f"killed-{transport}"
    with server.client() as client:
        with forked_clients.start("import_and_wait", server.address, transport, "npz", str(large), name) as child:
            num_written, _, num_rows = child.line().split()
            assert 0 < int(num_written) < int(num_rows)
            assert name not in client
            with pytest.raises(tdserve.StoreExistsError):
                import_store(client, "npz", large, name, keys=["number"])
            child.kill()
        store = wait_for(partial(import_if_free, client, large, name), "the end of what was begun")
        assert store["number"][252] == 1
        client.delete(name)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["gloo", pytest.param("shm", marks=pytest.mark.full)])
def test_import_when_the_file_is_larger_than_the_memory_then_all_of_it_arrives(
    server: tdserve.Server, forked_clients: ForkedClients, large: Path, transport: str
) -> None:
    name = f"large-{transport}"
    command = ("import_with_little_memory", server.address, transport, "npz", str(large), name, ROOM_NBYTES)
    with server.client() as client, forked_clients.start(*command) as child:
        assert child.line() == "imported"
        store = client[name]
        assert (store["number"] == torch.arange(LARGE_NBYTES >> 16) % 251).all()
        for start in range(0, LARGE_NBYTES >> 16, 512):
            found = store[start : start + 512]
            assert (found["pixels"] == found["number"][:, None]).all()
        client.delete(name)


class Shell:
    """Runs the command against a server."""

    def __init__(self, address: str, capsys: pytest.CaptureFixture[str]) -> None:
        self._address = address
        self._capsys = capsys

    def run(self, *arguments: str) -> tuple[int, str, str]:
        """Exit code, standard output, standard error."""
        code = main(["import", *arguments, "--address", self._address])
        return (code, *self._capsys.readouterr())


@pytest.fixture
def shell(server: tdserve.Server, capsys: pytest.CaptureFixture[str]) -> Shell:
    """A shell."""
    return Shell(server.address, capsys)


@pytest.mark.slow
def test_command_when_run_then_one_line_of_result_and_progress_if_asked(
    shell: Shell, client: tdserve.Client, name: str, tmp_path: Path
) -> None:
    path = str(tmp_path / "a.npz")
    np.savez(path, **make_columns())
    code, out, err = shell.run("npz", path, name)
    assert (code, err) == (0, "")
    assert out.startswith(f"{name}: batch size [300], ")
    check_rows(client[name])
    code, out, err = shell.run("npz", path, name)
    assert (code, out) == (6, "")
    assert "--replace" in err
    code, out, err = shell.run("npz", path, name, "--replace", "--key", "obs/half", "--key", "done", "--progress")
    assert code == 0
    assert f"{name}: 300 of 300 rows (100 %), " in err
    assert {*client[name].keys()} == {"obs", "done"}
    assert shell.run("npz", path, name, "--replace", "--json")[1].startswith('{"name": ')
    assert shell.run("npz", os.fspath(tmp_path), name, "--replace")[0] == 1
    check_rows(client[name])


class InterruptingTerminal(io.StringIO):
    """A terminal whose reader interrupts the import as soon as it sees that rows are written."""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if "rows/s" in text:
            raise KeyboardInterrupt
        return super().write(text)


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_command_when_interrupted_then_its_last_line_is_what_is_left(
    shell: Shell, client: tdserve.Client, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "a.npz")
    np.savez(path, **make_columns())
    terminal = InterruptingTerminal()
    monkeypatch.setattr("sys.stderr", terminal)
    assert shell.run("npz", path, name)[0] == 130
    assert terminal.getvalue() == "aborted: nothing was stored\n"
    assert name not in client
    assert shell.run("npz", path, name, "--no-progress")[0] == 0
    with monkeypatch.context() as patch:
        patch.setattr("zipfile.ZipFile.open", interrupt)
        assert shell.run("npz", path, name, "--replace")[0] == 130
    assert terminal.getvalue().endswith(f"\naborted: nothing was stored, and {name} is as it was\n")
    check_rows(client[name])
    assert shell.run("npz", path, name, "--replace")[0] == 130
    assert terminal.getvalue().endswith(f"the {name} that was to be replaced is already deleted\n")
    assert name not in client
