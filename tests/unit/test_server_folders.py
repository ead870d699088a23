from __future__ import annotations

from pathlib import Path

import pytest

from tdserve.base.errors import InvalidRequestError
from tdserve.server_folders import assign_numbers, list_numbers, name_folder, start_with_token


def test_folders_when_listed_then_only_those_of_servers(tmp_path: Path) -> None:
    assert list_numbers(str(tmp_path / "none")) == []
    for name in ("server-10", "server-2", "server-02", "server-", "other", "server-1.old"):
        (tmp_path / name).mkdir()
    assert list_numbers(str(tmp_path)) == [2, 10]
    assert name_folder(str(tmp_path), 2) == str(tmp_path / "server-2")


@pytest.mark.parametrize(
    ("seen", "numbers"),
    [
        ([[], [], []], [0, 1, 2]),  # new
        ([[0], [1], [2]], [0, 1, 2]),
        ([[0, 1, 2]] * 3, [0, 1, 2]),  # shared
        ([[1], [2], [0]], [1, 2, 0]),  # machines in another order
        ([[1, 2], [0], [1, 2]], [1, 0, 2]),  # two on one machine
        ([[2, 1], [1, 2], [0]], [1, 2, 0]),
    ],
)
def test_numbers_when_assigned_then_each_place_has_the_folder(seen: list[list[int]], numbers: list[int]) -> None:
    assert assign_numbers(seen) == numbers


@pytest.mark.parametrize("seen", [[[0], []], [[], [1]], [[1], [1]], [[0, 1, 2]] * 2, [[0], [2]], [[0, 1]] * 3])
def test_numbers_when_folders_do_not_fit_then_refused(seen: list[list[int]]) -> None:
    with pytest.raises(InvalidRequestError, match="share a path, or use empty folders"):
        assign_numbers(seen)


@pytest.mark.slow
def test_server_when_started_with_a_token_then_keeps_no_file_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    server = start_with_token(str(tmp_path / "server-0"), "127.0.0.1", "token", {"sync_interval_s": 0.0})
    try:
        assert list((tmp_path / "tmp").iterdir()) == []
        server.client(token="token").close()
    finally:
        server.shutdown()
