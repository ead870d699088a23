from __future__ import annotations

from pathlib import Path

import pytest

from tdserve.base.errors import CorruptDataError
from tdserve.store.rows.claim_file import FOLDER, LOST, MAX_RECORDS, ClaimedRows, ClaimFile, remove_others

CLIENT = bytes(range(16))


@pytest.fixture
def server(tmp_path: Path) -> ClaimFile:
    """The server's end of a claim file; ten rows may be claimed."""
    return ClaimFile.create(tmp_path / FOLDER / "lock.1", 10)


@pytest.fixture
def client(server: ClaimFile) -> ClaimFile:
    """The client's end, with a mapping of its own."""
    return ClaimFile.open(server.path)


def test_claim_when_rows_are_allowed_then_each_follows_the_one_before_and_the_server_sees_them(
    server: ClaimFile, client: ClaimFile
) -> None:
    assert [client.claim(4), client.claim(6)] == [0, 4]
    assert (server.num_claimed, server.num_written) == (10, 0)


def test_claim_when_more_than_are_allowed_then_nothing_is_changed(server: ClaimFile, client: ClaimFile) -> None:
    assert client.claim(4) == 0
    assert client.claim(7) is None
    assert server.num_claimed == 4
    server.take(0, 11)
    assert client.claim(7) == 4


def test_claim_when_it_was_ended_then_none_and_earlier_claims_are_counted(server: ClaimFile, client: ClaimFile) -> None:
    assert client.claim(4) == 0
    server.end()
    assert client.claim(1) is None
    assert client.is_over
    assert server.num_claimed == 4


def test_claim_when_ended_between_its_two_looks_then_lost(server: ClaimFile, client: ClaimFile) -> None:
    def fence() -> None:
        server.end()

    client.fence = fence  # type: ignore[method-assign]
    assert client.claim(4) == LOST
    assert server.num_claimed == 4, "the server counts on them, or not: the client fills them in no case"


def test_write_when_records_go_round_then_none_is_lost_and_none_written_over(
    server: ClaimFile, client: ClaimFile
) -> None:
    server.take(0, 10 * MAX_RECORDS)
    for number in range(MAX_RECORDS):
        assert client.claim(1) == number
        client.write(ClaimedRows(CLIENT, number + 7, 1))
    assert client.claim(1) is None, "the server has all of them still to take"
    server.take(3, 10 * MAX_RECORDS)
    for number in range(MAX_RECORDS, MAX_RECORDS + 3):
        assert client.claim(2) is not None
        client.write(ClaimedRows(CLIENT, number + 7, 2))
    assert server.num_written == MAX_RECORDS + 3
    found = [server.record(number) for number in range(3, server.num_written)]
    assert found == [(CLIENT, number + 7, 1 + (number >= MAX_RECORDS)) for number in range(3, MAX_RECORDS + 3)]


def test_write_when_it_passes_the_row_set_by_the_server_then_it_must_be_reported(
    server: ClaimFile, client: ClaimFile
) -> None:
    server.request_messages(4)
    assert [client.claim(2), client.write(ClaimedRows(CLIENT, 1, 2))] == [0, False]
    assert [client.claim(2), client.write(ClaimedRows(CLIENT, 2, 2))] == [2, True]
    assert [client.claim(1), client.write(ClaimedRows(CLIENT, 3, 1))] == [4, True]


def test_open_when_the_file_was_cut_short_then_corrupt(server: ClaimFile) -> None:
    server.path.write_bytes(b"short")
    with pytest.raises(CorruptDataError, match="5 bytes"):
        ClaimFile.open(server.path)


def test_remove_others_when_some_are_kept_then_these_stay(tmp_path: Path, server: ClaimFile) -> None:
    folder = server.path.parent
    ClaimFile.create(folder / "left", 1)
    remove_others(folder, {"lock.1"})
    assert [each.name for each in folder.iterdir()] == ["lock.1"]
    server.unlink()
    server.unlink()
    remove_others(folder / "missing", set())
