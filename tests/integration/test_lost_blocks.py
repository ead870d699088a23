"""A place of checkpoints that has lost a file: the next checkpoint is whole nevertheless."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.cli.main import main
from tdserve.cli.shell.exit_codes import DAMAGED

pytestmark = pytest.mark.integration


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tdserve.Server]:
    """A server of its own."""
    with tdserve.Server(tmp_path / "root") as server:
        yield server


@pytest.mark.slow
@pytest.mark.parametrize("is_missing", [False, True], ids=["damaged", "missing"])
def test_place_when_a_block_was_lost_then_the_next_checkpoint_writes_it_again(
    server: tdserve.Server, tmp_path: Path, capsys: pytest.CaptureFixture[str], *, is_missing: bool
) -> None:
    place = tmp_path / "place"
    with server.client() as client:
        client.memmap(TensorDict({"x": torch.arange(400_000)}, [400_000]), "big")
        client.checkpoint(place)
    lost = max(place.glob("blocks/*/*"), key=lambda each: each.stat().st_size)
    lost.unlink() if is_missing else lost.write_bytes(b"something else")
    assert main(["check", str(place), "--repair"]) == DAMAGED
    assert "a later checkpoint writes a block again" in capsys.readouterr().out
    assert not lost.exists()
    with server.client() as client:
        assert client.checkpoint(place).written_nbytes >= 1 << 20
        assert main(["check", str(place)]) == 0
        client.restore(place, prefix="new-")
        assert client["new-big"]["x"][-1] == 399_999


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["", "simplecache::file://"])
def test_place_when_a_block_is_cut_short_then_named_and_the_next_checkpoint_writes_it_again(
    server: tdserve.Server, tmp_path: Path, scheme: str
) -> None:
    place = f"{scheme}{tmp_path}/place"
    with server.client() as client:
        client.memmap(TensorDict({"x": torch.arange(400_000)}, [400_000]), "big")
        first = client.checkpoint(place, keep=1)
        cut = max(tmp_path.glob("place/blocks/*/*"), key=lambda each: each.stat().st_size)
        whole = cut.stat().st_size
        cut.write_bytes(b"")
        (listed,) = tdserve.list_checkpoints(place)
        assert listed.damage == "one of its blocks is of another size, of store 'big'"
        second = client.checkpoint(place, keep=2)
        assert cut.stat().st_size == whole
        assert second.written_nbytes >= whole
        assert [(each.id, each.damage) for each in tdserve.list_checkpoints(place)] == [(first.id, ""), (second.id, "")]
        client.restore(place, prefix="new-")
        assert client["new-big"]["x"][-1] == 399_999


@pytest.mark.slow
def test_keep_when_the_new_checkpoint_has_lost_a_block_then_the_whole_one_before_stays(
    server: tdserve.Server, tmp_path: Path
) -> None:
    place = tmp_path / "place"
    with server.client() as client:
        client.memmap(TensorDict({"x": torch.arange(400_000)}, [400_000]), "big")
        first = client.checkpoint(place)
        before = {*place.glob("blocks/*/*")}
        client["big"].set_at_("x", torch.tensor(7), 399_999)
        second = client.checkpoint(place)
        cut = max({*place.glob("blocks/*/*")} - before, key=lambda each: each.stat().st_size)
        cut.write_bytes(b"")
        client["big"].set_at_("x", torch.tensor(8), 399_999)  # the next one does not need that block
        third = client.checkpoint(place, keep=2)
        assert [each.id for each in tdserve.list_checkpoints(place)] == [first.id, second.id, third.id]
        client.restore(place, checkpoint=first.id, prefix="old-")
        assert client["old-big"]["x"][-1] == 399_999


@pytest.mark.slow
def test_place_when_a_manifest_is_damaged_then_later_checkpoints_are_made_and_no_block_is_removed(
    server: tdserve.Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "place"
    with server.client() as client:
        client.memmap(TensorDict({"x": torch.arange(4)}, [4]), "s")
        first = client.checkpoint(place)
        place.joinpath("checkpoints", f"{first.id}.json").write_text("something else")
        assert main(["checkpoint", str(place), "--list"]) == 8
        assert f"{first.id} cannot be restored" in capsys.readouterr().err
        blocks = {*place.glob("blocks/*/*")}
        client["s"].set_at_("x", torch.tensor(7), 0)
        client.checkpoint(place, keep=1)
        newest = client.checkpoint(place, keep=1)
        assert {path.stem for path in place.glob("checkpoints/*")} == {first.id, newest.id}
        assert blocks <= {*place.glob("blocks/*/*")}
        client.restore(place, prefix="new-")
        assert client["new-s"]["x"].tolist() == [7, 1, 2, 3]
