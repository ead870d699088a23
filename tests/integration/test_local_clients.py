"""Who may be a local client, and what a client may do that sees the files but may not write them."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import tdserve
from tests.integration.forked_clients import ForkedClients
from tests.integration.local_roles import NUM_ROWS, numbers_in, row, rows
from tests.processes import wait_for

pytestmark = pytest.mark.integration

NOBODY = 65534

BEFORE, AFTER = 1, 2


@pytest.fixture(scope="module")
def public_server() -> Iterator[tdserve.Server]:
    """A server in a folder that every user may enter, as pytest's are not."""
    folder = Path(tempfile.mkdtemp(prefix="tdserve-test-"))
    folder.chmod(0o755)
    try:
        with tdserve.Server(folder / "root", port=0) as started:
            yield started
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def client(public_server: tdserve.Server) -> Iterator[tdserve.Client]:
    """A client of it, whose stores go with the test."""
    with public_server.client(transport="shm", timeout_s=20.0) as made:
        yield made
        for name in made.stores():
            made.delete(name)


@pytest.mark.slow
def test_connect_when_another_mount_namespace_hides_the_root_then_gloo_or_not_local_error(
    forked_clients: ForkedClients, public_server: tdserve.Server, client: tdserve.Client
) -> None:
    if os.getuid() != 0:
        pytest.skip("only root may make a mount namespace")
    client.create_replay("r", row(), 3 * NUM_ROWS).extend(rows(BEFORE))
    with forked_clients.start("leave_root", public_server.address, public_server.config.root) as hidden:
        said = [hidden.line()]
        if said == ["not allowed"]:
            pytest.skip("this container may not make a mount namespace")
        said += hidden.rest()
    assert said[:2] == ["auto gloo", f"sampled {BEFORE} 2"]
    assert said[2].startswith("error NotLocalError True no shared memory")
    assert "does not see the server's root folder" in said[2]
    assert said[3] == "at once True"


def test_connect_when_it_names_another_folder_then_refused_and_auto_goes_on(
    public_server: tdserve.Server, client: tdserve.Client, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    shutil.copy(Path(public_server.config.root) / "nonce", copy)  # the right content is not the right file
    with pytest.raises(tdserve.ConnectError, match="another one"):
        public_server.client(transport="shm", root=str(copy))
    with public_server.client(root=str(copy)) as other:
        assert other.stats()["transport"] == "gloo"
    link = tmp_path / "link"
    link.symlink_to(public_server.config.root)
    with public_server.client(transport="shm", root=str(link)) as client:
        client.init_remote(rows(BEFORE), "td")
        assert numbers_in(client.from_remote_init("td")) == [BEFORE] * NUM_ROWS


@pytest.mark.slow
def test_client_when_in_another_namespace_of_processes_then_it_reads_values_through_the_server(
    forked_clients: ForkedClients, public_server: tdserve.Server, client: tdserve.Client
) -> None:
    if os.getuid() != 0:
        pytest.skip("only root may make a namespace of processes")
    client.create_replay("x-r", row("text"), 2 * NUM_ROWS).extend(rows(BEFORE, text="text"))
    client.memmap(rows(BEFORE, text="text"), "x-td")
    with forked_clients.start("leave_pids", public_server.address, "x") as other:
        said = other.rest()
    if said == ["not allowed"]:
        pytest.skip("this container may not make a namespace of processes")
    assert said == ["pid 1 shm", *[f"sampled {BEFORE}", f"read {BEFORE}"], *[f"sampled {BEFORE} 5", f"read {BEFORE} 5"]]
    assert numbers_in(client.from_remote_init("x-td"))[:4] == [BEFORE, 5, 5, BEFORE]


@pytest.mark.slow
def test_client_when_it_may_not_write_the_files_then_it_reads_them_and_writes_over_its_channel(
    forked_clients: ForkedClients, public_server: tdserve.Server, client: tdserve.Client
) -> None:
    if os.getuid() != 0:
        pytest.skip("only root may become another user")
    root = Path(public_server.config.root)
    client.create_replay("r", row(), 3 * NUM_ROWS).extend(rows(BEFORE))
    client.create_replay("p", row(), NUM_ROWS, sampler=tdserve.Prioritized(alpha=1.0)).extend(rows(BEFORE))
    client.init_remote(rows(BEFORE), "td")
    assert "first" in client["td"].keys()  # noqa: SIM118 (which makes its files)
    client.publish("w", rows(BEFORE))
    modes = [path.stat().st_mode for path in (root / "stores").rglob("*") if path.is_file()]
    assert not any(mode & (stat.S_IWGRP | stat.S_IWOTH) for mode in modes)
    with forked_clients.start("use_read_only", public_server.address, uid=NOBODY) as reader:
        said = reader.rest()
    assert said == [
        "connected shm",
        f"sampled {BEFORE}",
        f"read {BEFORE}",
        "store " + " ".join([str(BEFORE)] * (NUM_ROWS + 1)),
        *["latest " + " ".join([str(BEFORE)] * NUM_ROWS)] * 2,
        "updated 3",
        "written 9 9 2",
    ]
    assert sorted(client.stores()) == ["copied", "new", "new-w", "p", "r", "td", "w"]
    assert set(numbers_in(client.replay("r")[NUM_ROWS:])) == {9}
    assert client["copied"]["x"].sum() == 0


@pytest.mark.slow
def test_fork_when_a_client_is_used_in_the_child_then_refused_and_the_parents_lock_is_not_kept_alive(
    forked_clients: ForkedClients, public_server: tdserve.Server, client: tdserve.Client
) -> None:
    replay = client.create_replay("r", row(), 2 * NUM_ROWS)
    replay.extend(rows(BEFORE))
    client.publish("w", rows(BEFORE))
    with forked_clients.start("fork_with", public_server.address) as parent:
        said: list[str] = []
        while len(said) < 9:  # six of the child, two of the parent, and its end
            said.append(parent.line())
        child = next(int(line.split()[1]) for line in said if line.startswith("forked"))
        try:
            assert f"ended {-signal.SIGKILL}" in said
            os.kill(child, 0)  # it lives, and has nothing of the parent's
            wait_for(lambda: replay.info()["reserved_rows"] == 0, "the proof that the parent is gone")
        finally:
            os.kill(child, signal.SIGKILL)
    assert [line for line in said if line.startswith("child")] == [
        *["child ForkedClientError"] * 3,
        "child sees " + " ".join([str(BEFORE)] * NUM_ROWS),
        f"child samples {BEFORE}",
        f"child inherited {BEFORE}",
    ]
    assert f"parent {BEFORE}" in said
