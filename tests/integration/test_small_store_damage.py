"""Damage in the catalog's record of a small store that nobody has used yet. It is repaired or reported, and never read
as zeros."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.client.moves.archive_check import check_archive
from tdserve.server.checking.root_check import check_root
from tdserve.store.database.environments import DATA_FILE
from tdserve.store.values.object_folders import get_folder

pytestmark = [pytest.mark.integration, pytest.mark.slow]

CONTENT = torch.arange(64) * 1_000_003


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root whose server has ended in order, with two small stores that nobody has read."""
    root = tmp_path / "root"
    with tdserve.Server(root, num_workers=1).start() as server, server.client(transport="gloo") as client:
        client.init_remote(TensorDict({"x": CONTENT}, [64]), "small")
        client.init_remote(TensorDict({"x": -CONTENT}, [64]), "other")
    return root


def flip(path: Path, content: torch.Tensor) -> None:
    """Flips a bit wherever a file has this content."""
    found, pattern = bytearray(path.read_bytes()), content.numpy().tobytes()
    place, num = found.find(pattern), 0
    while place >= 0:
        found[place + 8] ^= 1
        place, num = found.find(pattern), num + 1
    assert num
    path.write_bytes(found)


def read(client: tdserve.Client, name: str) -> list[int]:
    found: list[int] = client[name][:]["x"].tolist()
    return found


def test_packed_store_when_its_content_is_damaged_everywhere_then_left_out_of_checkpoints_and_named_by_each_check(
    root: Path, tmp_path: Path
) -> None:
    for path in (root / "catalog" / DATA_FILE, root / "synced" / "catalog.mdb"):
        flip(path, CONTENT)
    place = tmp_path / "place"
    for round_number in range(2):
        with tdserve.Server(root, num_workers=1).start() as server, server.client(transport="gloo") as client:
            with pytest.raises(tdserve.CorruptDataError):
                read(client, "small")
            assert read(client, "other") == (-CONTENT).tolist()
            made = client.checkpoint(place)
            assert (made.left_out, [store.name for store in made.stores]) == (["small"], ["other"])
        report = check_root(root, repairs=round_number == 0)
        assert report.num_damaged > 0
        assert "small" in " ".join(each.describe() for each in report.findings)
    with tdserve.Server(tmp_path / "two", num_workers=1).start() as server, server.client(transport="gloo") as client:
        client.restore(place)
        assert client.stores() == ["other"]


def test_packed_store_when_a_server_starts_and_ends_over_damage_then_a_repair_still_loses_nothing(root: Path) -> None:
    flip(root / "catalog" / DATA_FILE, CONTENT)
    with tdserve.Server(root, num_workers=1).start() as server, server.client(transport="gloo") as client:
        client.init_remote(TensorDict({"x": CONTENT + 1}, [64]), "new")  # so that the catalog is copied
    assert check_root(root, repairs=True).num_damaged == 0
    with tdserve.Server(root, num_workers=1).start() as server, server.client(transport="gloo") as client:
        assert read(client, "small") == CONTENT.tolist()
        assert read(client, "new") == (CONTENT + 1).tolist()


def test_values_when_a_server_starts_and_ends_over_damage_then_a_repair_still_loses_nothing(root: Path) -> None:
    texts = [f"text {number} of these rows" for number in range(8)]
    with tdserve.Server(root, num_workers=1).start() as server, server.client(transport="gloo") as client:
        rows = TensorDict({"text": texts}, [8])
        client.create_replay("texts", like=rows[0], capacity=8).extend(rows)
    path = get_folder(root / "stores" / "texts", 0) / DATA_FILE
    path.write_bytes(path.read_bytes().replace(b"text 3 of", b"text 9 of"))
    with tdserve.Server(root, num_workers=1).start():
        pass
    assert check_root(root, repairs=True).num_damaged == 0
    with tdserve.Server(root, num_workers=1).start() as server, server.client(transport="gloo") as client:
        assert client.replay("texts")[:]["text"].tolist() == texts


def test_root_when_the_folder_of_synced_files_is_gone_then_a_repair_makes_it_anew(root: Path) -> None:
    shutil.rmtree(root / "synced")
    assert check_root(root, repairs=True).num_damaged == 0
    assert check_root(root).findings == ()


def test_checkpoint_when_its_manifest_is_that_of_another_then_damaged_and_a_repair_removes_it(
    root: Path, tmp_path: Path
) -> None:
    place = tmp_path / "place"
    with tdserve.Server(root, num_workers=1).start() as server, server.client(transport="gloo") as client:
        first, second = (client.checkpoint(place).id for _ in range(2))
    shutil.copyfile(place / "checkpoints" / f"{first}.json", place / "checkpoints" / f"{second}.json")
    (damaged,) = check_archive(place).damaged
    assert second in damaged
    assert first in damaged
    assert len(check_archive(place, repairs=True).damaged) == 1
    report = check_archive(place)
    assert (report.damaged, report.num_checkpoints) == ((), 1)
