from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from tdserve.base.errors import CorruptDataError, RemoteProtocolError
from tdserve.messages.long_lists import find_columns, read_list
from tdserve.messages.selection.selection import from_message, parse
from tdserve.server.sessions import long_list_file
from tdserve.server.sessions.long_list_file import LongListFile, place_lists
from tdserve.v1 import control_pb2

FIRST, SECOND = np.arange(6).reshape(2, 3), np.array([[5, 5, 7], [1, 2, 3]])


def read_of(*lists: np.ndarray) -> control_pb2.ClientMessage:
    """Returns a read whose lists of rows were sent ahead of it."""
    selection = parse(lists).to_message()
    for item in selection.items:
        item.positions.nbytes_ahead = len(item.positions.data)
        item.positions.ClearField("data")
    return control_pb2.ClientMessage(read=control_pb2.ReadRequest(selection=selection))


def test_place_when_lists_came_in_parts_then_the_request_has_them_until_they_are_removed(tmp_path: Path) -> None:
    ahead = LongListFile(tmp_path)
    content = FIRST.tobytes() + SECOND.tobytes()
    for start in range(0, len(content), 40):
        ahead.add(content[start : start + 40])
    message = read_of(FIRST, SECOND)
    place_lists(message, ahead)
    found = from_message(message.read.selection)
    assert found == parse((FIRST, SECOND))
    asyncio.run(ahead.remove())
    assert list(tmp_path.iterdir()) == []
    assert found == parse((FIRST, SECOND))  # lists that were taken stay valid
    with pytest.raises(FileNotFoundError):
        from_message(message.read.selection)


def test_place_when_rows_are_to_be_deleted_then_they_are_read_from_the_file(tmp_path: Path) -> None:
    ahead = LongListFile(tmp_path)
    ahead.add(b"rows")
    message = control_pb2.ClientMessage(change=control_pb2.ChangeRequest(delete=control_pb2.Rows(nbytes_ahead=4)))
    place_lists(message, ahead)
    assert read_list(message.change.delete) == b"rows"
    assert read_list(control_pb2.Rows(data=b"few")) == b"few"


def test_place_when_rows_to_be_deleted_have_generations_then_these_come_after_the_rows(tmp_path: Path) -> None:
    ahead = LongListFile(tmp_path)
    ahead.add(b"rowsgenerations")
    change = control_pb2.ChangeRequest(
        delete=control_pb2.Rows(nbytes_ahead=4), delete_generations=control_pb2.RowColumn(nbytes_ahead=11)
    )
    message = control_pb2.ClientMessage(change=change)
    place_lists(message, ahead)
    assert read_list(message.change.delete) == b"rows"
    assert read_list(message.change.delete_generations) == b"generations"


def test_place_when_an_extend_has_long_row_columns_then_each_column_has_its_part(tmp_path: Path) -> None:
    ahead = LongListFile(tmp_path)
    ahead.add(b"prioritiesversions")
    extend = control_pb2.ExtendRequest(
        priorities=control_pb2.RowColumn(nbytes_ahead=10),
        ends=control_pb2.RowColumn(data=b"few"),
        policy_versions=control_pb2.RowColumn(nbytes_ahead=8),
    )
    message = control_pb2.ClientMessage(extend=extend)
    place_lists(message, ahead)
    assert [read_list(column) for column in find_columns(message.extend)] == [b"priorities", b"few", b"versions"]
    message.extend.ends.file = str(tmp_path / "secret")
    with pytest.raises(RemoteProtocolError, match="name of a file"):
        place_lists(message, ahead)


@pytest.mark.parametrize("num_bytes", [0, 40, 56], ids=["none", "less", "more"])
def test_place_when_other_bytes_came_then_refused(tmp_path: Path, num_bytes: int) -> None:
    ahead = LongListFile(tmp_path)
    ahead.add(bytes(num_bytes))
    for came in (ahead, None):
        with pytest.raises(RemoteProtocolError, match="48 bytes"):
            place_lists(read_of(FIRST), came)


def test_place_when_the_size_is_not_that_of_the_shape_then_the_selection_is_none(tmp_path: Path) -> None:
    ahead = LongListFile(tmp_path)
    ahead.add(bytes(40))
    message = read_of(FIRST)
    message.read.selection.items[0].positions.nbytes_ahead = 40
    place_lists(message, ahead)
    with pytest.raises(RemoteProtocolError, match="40 bytes"):
        from_message(message.read.selection)


def test_place_when_a_client_names_a_file_then_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(FIRST.tobytes())
    message = read_of(FIRST)
    message.read.selection.items[0].positions.file = str(tmp_path / "secret")
    with pytest.raises(RemoteProtocolError, match="name of a file"):
        place_lists(message, None)


def test_add_when_the_file_cannot_be_written_then_the_request_hears_of_it(tmp_path: Path) -> None:
    ahead = LongListFile(tmp_path / "gone")
    ahead.add(FIRST.tobytes())
    with pytest.raises(CorruptDataError, match="gone"):
        place_lists(read_of(FIRST), ahead)


def test_add_when_there_are_too_many_then_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_list_file, "MAX_LISTS_BYTES", 10)
    ahead = LongListFile(tmp_path)
    ahead.add(bytes(10))
    with pytest.raises(RemoteProtocolError, match="11"):
        ahead.add(bytes(1))
