from __future__ import annotations

import gc
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.base.deadline import Deadline
from tdserve.base.errors import (
    ConnectError,
    CorruptDataError,
    NotSupportedError,
    PeerLostError,
    TransferAbortedError,
)
from tdserve.base.machine import read_pid_namespace
from tdserve.client.local.end import LocalEnd
from tdserve.client.local.root_files import FileAccess, SeenFiles
from tdserve.client.session.session import Session
from tdserve.control.local import SOCKET_NAME
from tdserve.store.exchange.session_locks import SessionLock, is_held
from tdserve.store.rows.generations import FILE_NAME
from tdserve.structure.captures.capture import capture
from tdserve.v1 import control_pb2
from tests.processes import maps_file, wait_for
from tests.unit.worker.peer import UID, StoredTensorDict

TD = TensorDict({"a": torch.arange(3)}, [3])
OTHER_UID = "f" * 32


@pytest.fixture
def session(local_client: tdserve.Client) -> Session:
    """A session of a local client."""
    return local_client.session(Deadline.after(20.0))


def local_of(session: Session) -> LocalEnd:
    """Returns the local end of a session."""
    assert session.local is not None
    return session.local


def lock_names(local: LocalEnd) -> list[str]:
    """Returns the names of the locks that are held."""
    folder = local.root / "sessions"
    return [name for name in os.listdir(folder) if is_held(folder, name)]


def test_session_when_on_the_servers_machine_then_local_until_it_ends(session: Session) -> None:
    local = local_of(session)
    assert (session.transport, session.why_not_local) == ("shm", "")
    assert (local.is_read_only, local.lacks_values) == (False, False)
    assert session.welcome.local.lock_name in lock_names(local)
    session.close()
    session.close()
    assert session.welcome.local.lock_name not in lock_names(local)
    with pytest.raises(ConnectError):
        local.send(control_pb2.ClientMessage())


def test_delete_when_this_client_has_the_store_mapped_then_its_space_is_free_at_once(
    local_client: tdserve.Client, session: Session, name: str
) -> None:
    replay = local_client.create_replay(name, TensorDict({"a": torch.zeros(1000)}, []), 8)
    replay.extend(TensorDict({"a": torch.zeros(8, 1000)}, [8]))
    assert replay.sample(4)["a"].sum() == 0
    inode = (local_of(session).root / "stores" / name / "rows" / "a.memmap").stat().st_ino
    assert maps_file(os.getpid(), inode)
    local_client.delete(name)
    assert not maps_file(os.getpid(), inode)


class Refusing:
    """A root whose server lets nobody in."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "sessions").mkdir()
        (root / "nonce").write_text("nonce")
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(root / SOCKET_NAME))
        self._socket.listen()
        self._thread = Thread(target=self._refuse)
        self._thread.start()

    def welcome(self) -> control_pb2.Welcome:
        """What it said over the network."""
        nonce = (self.root / "nonce").stat()
        local = control_pb2.LocalRoot(
            root=str(self.root),
            nonce="nonce",
            device=nonce.st_dev,
            inode=nonce.st_ino,
            pid_namespace=read_pid_namespace(),
            lock_name="lock",
            key=b"k",
        )
        return control_pb2.Welcome(session=1, local=local)

    def _refuse(self) -> None:
        peer, _ = self._socket.accept()
        with peer:
            peer.recv(1 << 16)

    def close(self) -> None:
        """Ends it."""
        self._thread.join()
        self._socket.close()


@pytest.fixture
def refusing(tmp_path: Path) -> Iterator[Refusing]:
    """A listener that refuses."""
    made = Refusing(tmp_path)
    yield made
    made.close()


def test_open_when_the_server_does_not_let_it_in_then_error_nothing_is_held_and_the_session_is_not_lost(
    refusing: Refusing,
) -> None:
    lost: list[str] = []
    num_open = len(os.listdir("/proc/self/fd"))
    with pytest.raises(PeerLostError, match="did not let this client in"):
        LocalEnd.open(
            refusing.welcome(),
            access=FileAccess(),
            on_message=lambda message: None,
            on_lost=lambda: lost.append("lost"),
        )
    assert lost == []
    assert not is_held(refusing.root / "sessions", "lock")
    wait_for(lambda: len(os.listdir("/proc/self/fd")) <= num_open, "the end of its files")


def test_open_when_another_process_has_the_lock_file_then_error_and_the_lock_stays(refusing: Refusing) -> None:
    theirs = SessionLock.hold(refusing.root / "sessions", "lock")
    assert theirs is not None
    with pytest.raises(ConnectError, match="lock"):
        LocalEnd.open(refusing.welcome(), access=FileAccess(), on_message=lambda message: None, on_lost=lambda: None)
    assert is_held(refusing.root / "sessions", "lock")
    theirs.release()
    with socket.socket(socket.AF_UNIX) as knocking:  # lets the fixture end
        knocking.connect(str(refusing.root / SOCKET_NAME))


@pytest.fixture
def end(tmp_path: Path) -> LocalEnd:
    """A local end without a server; its root is ``tmp_path``."""
    return LocalEnd(SeenFiles(tmp_path), lock=None, spool=None, lacks_values=False)


def stored(root: Path, name: str, *, uid: str = UID) -> StoredTensorDict:
    """A store's files below a root."""
    return StoredTensorDict(root / "stores" / name, TD, uid=uid)


def test_store_when_asked_for_again_then_mapped_once(end: LocalEnd, tmp_path: Path) -> None:
    files = stored(tmp_path, "x")
    found = end.store("x", UID, files.spec)
    assert end.store("x", UID, files.spec) is found
    assert found.leaves["a",].tolist() == [0, 1, 2]


def test_known_when_the_server_has_granted_it_then_by_name_and_structure_until_it_is_deleted(
    end: LocalEnd, tmp_path: Path
) -> None:
    files = stored(tmp_path, "x")
    found = end.store("x", UID, files.spec)
    assert end.find_known("x", files.spec) is None
    end.remember_readable(found)
    assert end.find_known("x", files.spec) is found
    assert end.find_known("x", capture(TD[:2]).spec) is None
    assert end.find_known("y", files.spec) is None
    files.generations.mark_deleted()
    assert end.find_known("x", files.spec) is None


def test_store_when_another_has_its_name_by_now_or_nothing_is_there_then_to_be_asked_for_again(
    end: LocalEnd, tmp_path: Path
) -> None:
    with pytest.raises(TransferAbortedError, match="deleted meanwhile"):
        end.store("x", UID, capture(TD).spec)
    files = stored(tmp_path, "x", uid=OTHER_UID)
    with pytest.raises(TransferAbortedError, match="deleted meanwhile"):
        end.store("x", UID, files.spec)
    assert end.store("x", OTHER_UID, files.spec).uid == OTHER_UID


def test_store_when_it_was_deleted_before_it_was_mapped_then_to_be_asked_for_again(
    end: LocalEnd, tmp_path: Path
) -> None:
    files = stored(tmp_path, "x")
    files.generations.mark_deleted()
    with pytest.raises(TransferAbortedError, match="deleted meanwhile"):
        end.store("x", UID, files.spec)


def test_store_when_its_files_are_damaged_then_that_error(end: LocalEnd, tmp_path: Path) -> None:
    files = stored(tmp_path, "x")
    os.truncate(tmp_path / "stores" / "x" / FILE_NAME, 4100)
    with pytest.raises(CorruptDataError, match=FILE_NAME):
        end.store("x", UID, files.spec)


@pytest.mark.slow
def test_store_when_others_were_deleted_then_they_are_mapped_no_more(end: LocalEnd, tmp_path: Path) -> None:
    old = stored(tmp_path, "old name")
    found = end.store("old name", UID, old.spec)
    end.remember_readable(found)
    kept = found.leaves["a",]
    old.generations.mark_deleted()
    shutil.rmtree(tmp_path / "stores" / "old name")
    del old, found
    new = stored(tmp_path, "new name", uid=OTHER_UID)
    end.store("new name", OTHER_UID, new.spec)
    gc.collect()
    assert "old name/generation" not in Path("/proc/self/maps").read_text()
    assert kept.tolist() == [0, 1, 2]  # what somebody uses stays
    del kept
    gc.collect()
    assert "old name" not in Path("/proc/self/maps").read_text()


def test_close_when_a_store_is_being_read_then_that_goes_on(session: Session, local_client: tdserve.Client) -> None:
    local_client.init_remote(TD, "read at the end")
    assert local_client["read at the end"]["a"].tolist() == [0, 1, 2]
    local = local_of(session)
    store = local.find_known("read at the end", capture(TD).spec)
    assert store is not None
    session.close()
    assert not store.generations.is_deleted
    assert store.leaves["a",].tolist() == [0, 1, 2]
    assert local.find_known("read at the end", capture(TD).spec) is None
    local_client.delete("read at the end")


def test_read_only_when_it_may_not_write_then_the_error_names_the_remedy(end: LocalEnd) -> None:
    assert end.is_read_only
    with pytest.raises(NotSupportedError, match="transport='gloo' to write"):
        end.check_writable("writing to 'x'")


def test_read_only_when_it_maps_a_store_then_as_it_is(end: LocalEnd, tmp_path: Path) -> None:
    files = stored(tmp_path, "x")
    leaf = end.store("x", UID, files.spec).leaves["a",]
    address = f"{leaf.data_ptr() & ~4095:x}"
    (line,) = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.startswith(address)]
    assert " r--s " in line


def test_send_when_never_attached_then_connect_error(end: LocalEnd) -> None:
    with pytest.raises(ConnectError):
        end.send(control_pb2.ClientMessage())
    end.close()


FORKING = """
import os, sys
import tdserve
import torch
from tdserve.client.local.end import LocalEnd
from tensordict import TensorDict

client = tdserve.connect(sys.argv[1], transport="shm")
client.init_remote(TensorDict({"x": torch.zeros(2)}, [2]), "of a fork")
child = os.fork()
if child == 0:
    LocalEnd.end_overwrites = lambda end: os._exit(7)
    sys.exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), "of a fork" in client.stores())
client.delete("of a fork")
client.close()
"""


def test_exit_when_of_a_forked_child_then_it_does_not_wait_for_overwrites_of_its_parent(
    local_client: tdserve.Client,
) -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORKING, local_client.address]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["0", "True"]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_fork_when_the_child_ends_then_the_parents_session_goes_on_and_its_lock_is_its_own(
    session: Session, local_client: tdserve.Client
) -> None:
    local = local_of(session)
    child = os.fork()
    if child == 0:
        try:
            local.send(control_pb2.ClientMessage())
        except ConnectError:
            os._exit(7)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7  # it has dropped what is the parent's
    assert session.welcome.local.lock_name in lock_names(local)
    local_client.init_remote(TD, "after a fork")
    assert not session.is_lost
    local_client.delete("after a fork")
