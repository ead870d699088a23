"""A restore of a checkpoint that was removed or damaged: the error says so, and names the newest whole one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.base.errors import CorruptDataError, InvalidRequestError
from tdserve.client.moves.checkpoint_restore import RestoreProgress
from tdserve.client.moves.manifest import Checkpoint, make_manifest_name, write_block
from tdserve.store.roots.archive import open_archive

pytestmark = pytest.mark.integration

NUM_ROWS = 400_000
"""Of eight bytes: several blocks."""


@pytest.fixture
def client(tmp_path: Path) -> Iterator[tdserve.Client]:
    """That of a server with one store."""
    with tdserve.Server(tmp_path / "root") as server, server.client() as client:
        client.memmap(TensorDict({"x": torch.arange(NUM_ROWS)}, [NUM_ROWS]), "big")
        yield client


def change_all(client: tdserve.Client) -> None:
    """Changes every block of the store."""
    client["big"].set_at_("x", client["big"]["x"] + 1, slice(0, NUM_ROWS))


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["", "memory://"])
def test_restore_when_its_checkpoint_is_removed_meanwhile_then_refused_with_the_id_of_the_newest(
    client: tdserve.Client, tmp_path: Path, scheme: str
) -> None:
    place, newest = f"{scheme}{tmp_path}/place", list[Checkpoint]()
    removed = client.checkpoint(place)

    def remove(progress: RestoreProgress) -> None:
        if not newest:
            change_all(client)
            newest.append(client.checkpoint(place, keep=1))

    with pytest.raises(InvalidRequestError) as caught:
        client.restore(place, prefix="new-", on_progress=remove)
    assert f"{place} no longer has {removed.id}, which was removed while it was read" in str(caught.value)
    assert f"--checkpoint {newest[0].id}" in str(caught.value)
    assert client.stores() == ["big"]
    assert client.restore(place, prefix="new-") == ["new-big"]


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["", "memory://"])
def test_restore_when_the_newest_manifest_is_damaged_then_refused_with_the_id_of_the_newest_whole_one(
    client: tdserve.Client, tmp_path: Path, scheme: str
) -> None:
    place = f"{scheme}{tmp_path}/place"
    made, archive = list[Checkpoint](), open_archive(place)
    for _ in range(3):
        made.append(client.checkpoint(place))
        change_all(client)
    whole, lacking, damaged = made
    archive.write("checkpoints/zz-note.json", b"{}")
    assert [each.id for each in tdserve.list_checkpoints(place)] == [each.id for each in made]
    write_block(archive, max(lacking.list_digests() - whole.list_digests() - damaged.list_digests()), b"")
    archive.write(make_manifest_name(damaged.id), archive.read(make_manifest_name(damaged.id))[:-100])
    for chosen in (damaged.id, None, lacking.id):
        with pytest.raises(CorruptDataError, match=f"--checkpoint {whole.id} "):
            client.restore(place, prefix="new-", checkpoint=chosen)
        assert client.stores() == ["big"]
    client.restore(place, prefix="new-", checkpoint=whole.id)
    assert client["new-big"]["x"][-1] == NUM_ROWS - 1


@pytest.mark.slow
def test_restore_when_a_block_that_all_checkpoints_have_is_damaged_then_none_is_named(
    client: tdserve.Client, tmp_path: Path
) -> None:
    place = tmp_path / "place"
    first = client.checkpoint(place)
    client["big"].set_at_("x", torch.tensor(7), 0)
    second = client.checkpoint(place)
    blocks = [place / "blocks" / each[:2] / each for each in first.list_digests() & second.list_digests()]
    shared = max(blocks, key=lambda each: each.stat().st_size)
    shared.write_bytes(bytes(shared.stat().st_size))
    assert [each.damage for each in tdserve.list_checkpoints(place)] == ["", ""]
    with pytest.raises(CorruptDataError, match=f"{shared.name}.*no other one is whole"):
        client.restore(place, prefix="new-")
