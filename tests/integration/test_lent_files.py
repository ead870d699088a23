"""Clients of another user on the server's machine, who may not enter the root: the server lends them what they may
read, and they write over their channel."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tdserve
from tests.integration.forked_clients import ForkedClients
from tests.integration.lent_roles import LARGE_NBYTES
from tests.integration.local_roles import NUM_ROWS, row, rows
from tests.integration.token_files import TIMEOUT_S, TokenFile
from tests.lending_kernel import needs_lending

pytestmark = [
    pytest.mark.integration,
    needs_lending,
    pytest.mark.skipif(os.getuid() != 0, reason="only root may become another user"),
]

NOBODY = 65534


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A folder that every user may enter, as pytest's are not."""
    made = Path(tempfile.mkdtemp(prefix="tdserve-lent-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="module")
def tokens(folder: Path) -> TokenFile:
    return TokenFile(folder / "tokens.json")


@pytest.fixture(scope="module")
def held(tokens: TokenFile) -> dict[str, str]:
    """Tokens by role; "some" may read two stores."""
    found = {role: tokens.add(role, role) for role in ("read", "admin")}
    return {**found, "some": tokens.add("some", "read", stores=["r", "w"])}


@pytest.fixture(scope="module")
def operator(folder: Path, tokens: TokenFile, held: dict[str, str]) -> Iterator[tdserve.Client]:
    """A client that may do everything, and has made the stores."""
    with (
        tdserve.Server(folder / "root", port=0, tokens_file=str(tokens.path)) as started,
        started.client(token=held["admin"], transport="shm", timeout_s=TIMEOUT_S) as client,
    ):
        client.create_replay("r", row("text"), 100).extend(rows(1, text="text"))
        client.memmap(rows(1, text="text"), "td")
        client.memmap(rows(1), "checked", checksum=True)
        client.publish("w", rows(1))
        kv = client.create_kv("kv")
        kv["small"] = torch.ones(3)
        yield client


@pytest.fixture(scope="module")
def others() -> Iterator[ForkedClients]:
    with ForkedClients("tests.integration.lent_roles") as made:
        yield made


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["auto", "shm"])
def test_client_when_of_another_user_then_it_reads_lent_files_and_writes_over_its_channel(
    operator: tdserve.Client, held: dict[str, str], others: ForkedClients, folder: Path, transport: str
) -> None:
    assert (folder / "root").stat().st_mode & 0o777 == 0o700
    before = operator.latest("w")
    assert before is not None
    with others.start("use_all", operator.address, NOBODY, held["admin"], transport) as guest:
        said = dict(line.split(" ", 1) for line in guest.rest() if " " in line)
    assert said["transport"] == "shm"
    assert said["sampled"] in ("1", "1 2")
    assert said["read"].split()[:2] == ["1", "1"]
    first = len(operator.replay("r")) - 4
    assert said["extended"] == f"{first} {first + 1}"
    assert said["early"] == f"{first + 2} {first + 3}"
    assert said["rows"].split() == ["1"] * NUM_ROWS + ["2"] * (len(operator.replay("r")) - NUM_ROWS)
    assert said["written"] == " ".join(["2", "2"] + ["1"] * (NUM_ROWS - 2))
    assert said["published"] == str(before.version + 1)
    assert said["latest"] == f"{before.version + 1} 2"
    assert said["entries"] == f"{LARGE_NBYTES // 4} 3"
    assert (said["new"], said["again"], said["checked"], said["many"]) == ("2", "3", "1 1", "200")
    for name in ("new", "mine"):
        operator.delete(name)
    operator["td"][:2] = rows(1, 2, text="text")


def test_client_when_it_is_lent_a_folder_then_it_reaches_no_other_and_changes_nothing(
    operator: tdserve.Client, held: dict[str, str], others: ForkedClients
) -> None:
    with others.start("go_elsewhere", operator.address, NOBODY, held["some"]) as guest:
        said = guest.rest()
    assert said[0].startswith("read 1")
    assert said[1] == "folder True"
    assert said[2:-1] == [
        *["refused PermissionError"] * 7,
        "refused PermissionDeniedError",
        "refused InvalidRequestError",
        "refused PermissionDeniedError",
    ]


def test_client_when_a_stores_files_are_not_lent_then_it_goes_on_over_the_network(
    operator: tdserve.Client, held: dict[str, str], others: ForkedClients, folder: Path
) -> None:
    mine = folder / "mine"
    rows(4).memmap(str(mine))
    mine.chmod(0o700)
    operator.adopt(mine, "adopted")
    with others.start("use_adopted", operator.address, NOBODY, held["read"]) as guest:
        said = guest.rest()
    operator.delete("adopted")
    assert said[:2] == ["read 1 1 shm", "adopted 4 4 gloo"]
    assert "in a folder of a user" in said[2]
    assert said[3] == "read 1 1"


@pytest.mark.slow
def test_client_when_the_umask_denies_it_then_it_uses_the_network(
    folder: Path, tokens: TokenFile, held: dict[str, str], others: ForkedClients
) -> None:
    token = held["admin"]
    with (
        tdserve.Server(folder / "closed", port=0, tokens_file=str(tokens.path), umask=0o077) as server,
        server.client(token=token) as client,
    ):
        client.create_replay("r", row("text"), 100).extend(rows(1, text="text"))
        client.memmap(rows(1, text="text"), "td")
        client.memmap(rows(1), "adopted")
        client.publish("w", rows(1))
        with others.start("use_adopted", server.address, NOBODY, token) as guest:
            said = guest.rest()
    assert said[:2] == ["read 1 1 gloo", "adopted 1 1 gloo"]
    assert "umask" in said[2]
