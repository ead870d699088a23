from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from tdserve.base.errors import CorruptDataError, RemoteProtocolError
from tdserve.messages.selection.selection import from_message, parse
from tdserve.server.sessions import positions_file
from tdserve.server.sessions.positions_file import PositionsFile, place_positions
from tdserve.v1 import content_pb2

FIRST, SECOND = np.arange(6).reshape(2, 3), np.array([[5, 5, 7], [1, 2, 3]])


def ahead_of(*lists: np.ndarray) -> content_pb2.Selection:
    """A selection by lists whose positions go ahead of it."""
    selection = parse(lists).to_message()
    for item in selection.items:
        item.positions.ClearField("data")
        item.positions.is_ahead = True
    return selection


def test_place_when_positions_came_in_parts_then_the_selection_has_them_until_they_are_removed(tmp_path: Path) -> None:
    ahead = PositionsFile(tmp_path)
    content = FIRST.tobytes() + SECOND.tobytes()
    for start in range(0, len(content), 40):
        ahead.add(content[start : start + 40])
    selection = ahead_of(FIRST, SECOND)
    place_positions(selection, ahead)
    found = from_message(selection)
    assert found == parse((FIRST, SECOND))
    asyncio.run(ahead.remove())
    assert list(tmp_path.iterdir()) == []
    assert found == parse((FIRST, SECOND))  # who has them has them
    with pytest.raises(FileNotFoundError):
        from_message(selection)


@pytest.mark.parametrize(
    "content", [b"", FIRST.tobytes()[:-8], FIRST.tobytes() + bytes(8)], ids=["none", "less", "more"]
)
def test_place_when_other_bytes_came_then_refused(tmp_path: Path, content: bytes) -> None:
    ahead = PositionsFile(tmp_path)
    ahead.add(content)
    with pytest.raises(RemoteProtocolError):
        place_positions(ahead_of(FIRST), ahead)


def test_place_when_nothing_came_ahead_then_the_selection_is_none() -> None:
    selection = ahead_of(FIRST)
    place_positions(selection, None)
    with pytest.raises(RemoteProtocolError, match="0 bytes"):
        from_message(selection)


def test_place_when_a_client_names_a_file_then_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(FIRST.tobytes())
    selection = ahead_of(FIRST)
    selection.items[0].positions.file = str(tmp_path / "secret")
    for ahead in (None, PositionsFile(tmp_path)):
        with pytest.raises(RemoteProtocolError, match="name of a file"):
            place_positions(selection, ahead)


def test_add_when_the_file_cannot_be_written_then_the_request_hears_of_it(tmp_path: Path) -> None:
    ahead = PositionsFile(tmp_path / "gone")
    ahead.add(FIRST.tobytes())
    with pytest.raises(CorruptDataError, match="gone"):
        place_positions(ahead_of(FIRST), ahead)


def test_add_when_there_are_too_many_then_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(positions_file, "MAX_POSITIONS_BYTES", 10)
    ahead = PositionsFile(tmp_path)
    ahead.add(bytes(10))
    with pytest.raises(RemoteProtocolError, match="11"):
        ahead.add(bytes(1))
