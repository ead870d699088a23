from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.base.errors import CorruptDataError, SpecMismatchError, TransferAbortedError
from tdserve.client.content.read_content import Content, Destination
from tdserve.client.content.value_blocks import encode_values
from tdserve.client.local.end import LocalEnd
from tdserve.client.local.local_writes import put_version
from tdserve.client.local.root_files import SeenFiles
from tdserve.client.weights.local_versions import map_version
from tdserve.client.weights.version_part import VersionPart
from tdserve.store.weights.version_locks import lock_exclusively
from tdserve.store.weights.versions import retire
from tdserve.structure.captures.capture import capture
from tdserve.v1 import control_pb2
from tests.unit.store.locked import is_locked

WEIGHTS = TensorDict({"w": torch.arange(6.0).view(2, 3), "n": {"b": torch.ones(4).bfloat16()}, "t": "text"}, [])
SPEC = capture(WEIGHTS).spec
ACCEPTED = control_pb2.Accepted(path="versions/1.safetensors", version=1)


@pytest.fixture
def end(tmp_path: Path) -> LocalEnd:
    """A local end of a root that has one version."""
    (tmp_path / "versions").mkdir()
    made = LocalEnd(SeenFiles(tmp_path), lock=None, spool=None, lacks_values=False)
    captured = capture(WEIGHTS)
    put_version(made, ACCEPTED, captured, encode_values(SPEC, captured.values, store="w"))
    return made


@pytest.fixture
def path(end: LocalEnd) -> Path:
    """Returns the path of the version's file."""
    return end.root / ACCEPTED.path


def found_here(
    client: tdserve.Client, end: LocalEnd, destination: Destination | None = None, *, copy: bool = True
) -> Content:
    """The version."""
    return map_version(
        client, end.root / ACCEPTED.path, SPEC, VersionPart(SPEC, SPEC), ACCEPTED, destination, copy=copy
    )


def test_version_when_copied_then_equal_and_the_file_is_free(
    local_client: tdserve.Client, end: LocalEnd, path: Path
) -> None:
    content = found_here(local_client, end)
    td = content.build()
    assert (td == WEIGHTS).all()
    assert td["t"] == "text"
    assert content.version == 1
    assert not is_locked(path)
    td["w"].zero_()
    assert torch.equal(found_here(local_client, end).build()["w"], WEIGHTS["w"])


@pytest.mark.slow
def test_version_when_mapped_then_locked_while_it_is_used_and_what_the_user_writes_stays_with_him(
    local_client: tdserve.Client, end: LocalEnd, path: Path
) -> None:
    td = found_here(local_client, end, copy=False).build()
    assert torch.equal(td["w"], WEIGHTS["w"])
    td["w"].zero_()
    assert torch.equal(found_here(local_client, end).build()["w"], WEIGHTS["w"])
    assert is_locked(path)
    del td
    gc.collect()
    assert not is_locked(path)


@pytest.mark.slow
@pytest.mark.parametrize("is_strided", [False, True])
@pytest.mark.parametrize("copy", [False, True])
def test_version_when_into_the_callers_tensors_then_filled(
    local_client: tdserve.Client, end: LocalEnd, path: Path, is_strided: bool, copy: bool
) -> None:
    out: TensorDict = WEIGHTS.clone().zero_()
    out.set_non_tensor("t", "old")
    if is_strided:
        out["w"] = torch.zeros(3, 2).T
    before = out["w"].data_ptr()
    found_here(local_client, end, Destination(out, store="w"), copy=copy)
    assert torch.equal(out["w"], WEIGHTS["w"])
    assert torch.equal(out["n", "b"], WEIGHTS["n", "b"])
    assert (out["t"], out["w"].data_ptr()) == ("text", before)
    gc.collect()
    assert not is_locked(path)


class Watching(Destination):
    """Looks whether the file is still locked when the caller's tensors are filled."""

    was_locked = False

    def __init__(self, out: Any, path: Path) -> None:
        super().__init__(out, store="w")
        self._path = path

    def finish(self, content: Content, *, was_direct: bool) -> None:
        self.was_locked = is_locked(self._path)
        super().finish(content, was_direct=was_direct)


def test_version_when_copied_out_of_its_file_by_pieces_then_locked_until_that_is_over(
    local_client: tdserve.Client, end: LocalEnd, path: Path
) -> None:
    out = WEIGHTS.clone()
    out["w"] = torch.zeros(3, 2).T
    destination = Watching(out, path)
    found_here(local_client, end, destination)
    assert destination.was_locked


def test_version_when_the_destination_does_not_fit_then_error_and_nothing_is_written(
    local_client: tdserve.Client, end: LocalEnd
) -> None:
    out = TensorDict({"w": torch.zeros(2, 2), "n": {"b": torch.zeros(4).bfloat16()}, "t": "old"}, [])
    with pytest.raises(SpecMismatchError):
        found_here(local_client, end, Destination(out, store="w"))
    assert not out["n", "b"].any()


@pytest.mark.slow
@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("way", ["retired", "being retired", "without its values"])
def test_version_when_it_was_retired_before_it_was_opened_then_to_be_asked_for_again(
    local_client: tdserve.Client, end: LocalEnd, path: Path, way: str, copy: bool
) -> None:
    num_open = len(os.listdir("/proc/self/fd"))
    locked = path if way == "being retired" else end.root / "another"
    if way == "retired":
        retire(path)
    elif way == "without its values":
        path.with_suffix(".values").unlink()
    with locked.open("ab") as writer:
        lock_exclusively(writer.fileno())
        with pytest.raises(TransferAbortedError):
            found_here(local_client, end, copy=copy)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= num_open


def test_version_when_its_file_is_damaged_then_that_error(
    local_client: tdserve.Client, end: LocalEnd, path: Path
) -> None:
    os.truncate(path, 100)
    with pytest.raises(CorruptDataError, match=path.name):
        found_here(local_client, end)


def test_latest_when_without_a_copy_then_the_file_itself_and_the_next_publication_leaves_it(
    local_client: tdserve.Client, name: str
) -> None:
    local_client.publish(name, WEIGHTS, keep=1)
    kept = local_client.latest(name, copy=False)
    assert kept is not None
    for number in range(4):
        local_client.publish(name, WEIGHTS.apply(lambda leaf, number=number: leaf * 0 + number), keep=1)
    assert torch.equal(kept.data["w"], WEIGHTS["w"])
    newest = local_client.latest(name, copy=False)
    assert newest is not None
    assert newest.data["w"].eq(3).all()


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("suffix", [".safetensors", ".values"])
def test_latest_when_the_files_of_its_only_version_are_lost_then_corrupt_data_at_once(
    server: tdserve.Server, local_client: tdserve.Client, name: str, suffix: str, copy: bool
) -> None:
    local_client.publish(name, WEIGHTS, keep=1)
    path = Path(server.config.root, "stores", name, "versions/1")
    path.with_suffix(suffix).unlink()
    with pytest.raises(CorruptDataError, match=r"versions/1\.safetensors.*a version that is kept"):
        local_client.latest(name, copy=copy)
