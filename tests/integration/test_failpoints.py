"""Kills a process at each failpoint in turn, starts it again, and checks what the table of failpoints states.

All kills share two servers; each operation has a store of its own. If the control process dies, its client dies with it
or goes on. If it goes on, its call must end as if nothing had
happened. Every run has one kill of each operation, ``-m full``
all of them; the simulation (``tests/simulation``) crashes at most failpoints of the control process in every run.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import tdserve
from tdserve.base.config import check_transport
from tdserve.base.failpoints import FAILPOINTS, VARIABLE
from tests.integration.forked_clients import Child, ForkedClients
from tests.integration.struck_operations import OPERATIONS, TIMEOUT_S, Operation
from tests.processes import quiet_port, wait_for
from tests.roots import make_quick_root

pytestmark = pytest.mark.integration


class Case(NamedTuple):
    """How a failpoint is reached, and which state it leaves.

    Attributes:
        operation: The operation that reaches it, by name.
        states: The possible states if the process dies and the operation is not repeated.
        transports: Transports of the client.
        server: The number of the server that dies.
        nth: The process dies when it reaches the failpoint for this time.
    """

    operation: str
    states: tuple[str, ...]
    transports: tuple[str, ...] = ("gloo",)
    server: int = 0
    nth: int = 1


OLD, NEW, BOTH = ("old",), ("new",), ("gloo", "shm")

CASES = {
    "creation.begun": Case("create", OLD),
    "files.made": Case("create", OLD),
    "creation.filled": Case("create", OLD),
    "creation.recorded": Case("create", NEW),
    "creation.packed": Case("create small", NEW),
    "filling.received": Case("fill", OLD),
    "filling.recorded": Case("fill", NEW),
    "deletion.recorded": Case("delete", NEW),
    "deletion.moved": Case("delete", NEW),
    "catalog.written": Case("extend", OLD),
    "extend.reserved": Case("extend", OLD),
    "extend.filled": Case("extend", OLD),
    "commit.recorded": Case("extend", NEW),
    "commit.shown": Case("extend", NEW),
    "long-commit.recorded": Case("extend long", NEW),
    "long-commit.part-shown": Case("extend long", NEW),
    "overwrite.staged": Case("overwrite", OLD),
    "overwrite.journalled": Case("overwrite", NEW),
    "values.stored": Case("overwrite", NEW),
    "overwrite.part-applied": Case("overwrite", NEW),
    "overwrite.applied": Case("overwrite", NEW),
    "overwrite.answered": Case("overwrite", NEW),
    "in-place.recorded": Case("overwrite", ("old", "lost"), ("shm",)),
    "in-place.answered": Case("overwrite", NEW, ("shm",)),
    "alteration.received": Case("add keys", OLD),
    "alteration.prepared": Case("add keys", OLD),
    "alteration.recorded": Case("add keys", NEW),
    "alteration.part-moved": Case("add keys", NEW),
    "alteration.moved": Case("add keys", NEW),
    "alteration.shown": Case("add keys", NEW),
    "leaves.recorded": Case("add leaves", NEW),
    "leaves.shown": Case("add leaves", NEW),
    "version.made": Case("publish", OLD, BOTH),
    "version.filled": Case("publish", OLD, BOTH),
    "publish.received": Case("publish", OLD),
    "publish.numbered": Case("publish", OLD),
    "publish.recorded": Case("publish", NEW),
    "checkpoint.resting": Case("checkpoint", OLD),
    "checkpoint.kept": Case("checkpoint", OLD),
    "archive.written": Case("checkpoint", OLD),
    "checkpoint.read": Case("checkpoint", OLD),
    "claim.granted": Case("extend often", NEW, BOTH),
    "claim.taken": Case("extend often", NEW, BOTH, nth=3),
    "claim.filled": Case("extend often", NEW, BOTH, nth=3),
    "claim.written": Case("extend often", NEW, BOTH, nth=3),
    "claim.found": Case("extend often", NEW, BOTH),
    "claim.committed": Case("extend often", NEW, BOTH),
    "put.changed": Case("put", OLD),
    "put.committed": Case("put", NEW),
    "put.reported": Case("put", NEW),
    "lease.drawn": Case("take", OLD),
    "change.recorded": Case("take", NEW),
    "change.applied": Case("delete rows", NEW),
    "move.sealed": Case("move", OLD),
    "move.written": Case("move", OLD, server=1),
    "move.completed": Case("move", OLD, server=1),
    "move.released": Case("move", NEW),
    "move.handed-over": Case("move", NEW),
    "move.recorded": Case("move", NEW, server=1),
    "move.shown": Case("move", NEW, server=1),
    "recovery.catalog-read": Case("overwrite", NEW),
    "recovery.keys-finished": Case("add keys", NEW),
    "recovery.writes-finished": Case("overwrite", NEW),
}
"""The case of each failpoint."""

FIRST_CRASH = {"overwrite": "overwrite.journalled", "add keys": "alteration.recorded"}
"""Failpoints at which a server that dies leaves something to recover."""


EVERY_DAY = {
    "files.made": ("both", "fails"),
    "creation.packed": ("server",),
    "filling.received": ("server",),
    "deletion.recorded": ("both",),
    "commit.recorded": ("server",),
    "long-commit.part-shown": ("both",),
    "overwrite.journalled": ("both",),
    "values.stored": ("other",),
    "alteration.part-moved": ("both",),
    "leaves.recorded": ("server",),
    "version.filled": ("other",),
    "publish.recorded": ("both",),
    "archive.written": ("other",),
    "claim.written": ("other",),
    "claim.found": ("server",),
    "put.changed": ("other", "fails"),
    "put.reported": ("server",),
    "change.recorded": ("server",),
    "change.applied": ("both",),
    "move.released": ("server",),
    "move.recorded": ("both",),
    "recovery.keys-finished": ("recovery",),
}
"""The cases of every run: the process dies with its client, the server dies alone, and so on."""


class Servers:
    """Two servers that see a failpoint when it is switched on, and are started again when they have died."""

    def __init__(self, folder: Path, forked_clients: ForkedClients) -> None:
        self._switch, self._forked_clients = folder / "failpoint", forked_clients
        self._servers = [tdserve.Server(folder / f"root{number}", port=quiet_port()) for number in range(2)]
        for number in range(2):
            self.start(number)

    def start(self, number: int) -> None:
        """Starts a server."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(VARIABLE, self.setting)
            self._servers[number].start()

    @property
    def setting(self) -> str:
        """The setting by which a process sees a failpoint that is switched on later."""
        return f"@{self._switch}"

    def switch_on(self, failpoint: str) -> None:
        """Has the next process strike that gets there."""
        unfinished = self._switch.with_suffix(".new")
        unfinished.write_text(failpoint)
        os.replace(unfinished, self._switch)

    @property
    def has_struck(self) -> bool:
        """Whether a process has got there."""
        return not self._switch.exists()

    def switch_off(self) -> bool:
        """Switches the failpoint off; returns whether a process has got there."""
        has_struck = self.has_struck
        self._switch.unlink(missing_ok=True)
        return has_struck

    def wait_died(self, number: int) -> None:
        """Waits until a server has died of the failpoint."""
        wait_for(lambda: not self._servers[number].is_alive, "the death of the control process", timeout_s=TIMEOUT_S)
        assert self.has_struck

    def begin(self, operation: str, transport: str, name: str, *, is_struck: bool = False) -> Child:
        """Has a client of its own process carry an operation out; ``is_struck``: it sees the failpoint itself."""
        setting = self.setting if is_struck else ""
        return self._forked_clients.start("act", operation, self.address_for(operation), transport, name, setting)

    def connect(self, operation: str, transport: str = "shm") -> Any:
        """Returns a client for an operation."""
        return tdserve.connect(self.address_for(operation), transport=check_transport(transport), timeout_s=TIMEOUT_S)

    def address_for(self, operation: str) -> str:
        """Returns the address of the servers of an operation: a store moves from the first to the second."""
        addresses = [server.address for server in self._servers]
        return ",".join(addresses) if operation == "move" else addresses[0]

    def list_folders(self, name: str) -> list[Path]:
        """Returns the folder of a store, and those of deleted stores."""
        roots = [Path(server.config.root) for server in self._servers]
        return [path for root in roots for part in (name, ".deleted-*") for path in root.glob(f"stores/{part}")]

    def shut_down(self) -> None:
        """Ends the servers."""
        for server in self._servers:
            server.shutdown()


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    """The servers of all cases. Their root is in memory: a process dies, not the machine."""
    with ExitStack() as stack:
        forked_clients = stack.enter_context(ForkedClients("tests.integration.struck_operations"))
        started = Servers(stack.enter_context(make_quick_root()), forked_clients)
        stack.callback(started.shut_down)
        yield started


@pytest.fixture
def name(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The name of a store; for a checkpoint a place with this name."""
    number = abs(hash(request.node.nodeid)) % 10**12
    is_place = request.node.callspec.params["failpoint"].startswith(("checkpoint", "archive"))
    return str(tmp_path / f"store-{number}") if is_place else f"store-{number}"


def _mark(name: str, kind: str) -> Any:
    return () if kind in EVERY_DAY.get(name, ()) else pytest.mark.full


def _list_kills(*processes: str, kind: str) -> list[Any]:
    return [
        pytest.param(name, transport, id=f"{name}-{transport}", marks=_mark(name, kind))
        for name, case in CASES.items()
        if FAILPOINTS[name].process in processes and not name.startswith("recovery.")
        for transport in case.transports
    ]


def _check_usable(servers: Servers, case: Case, name: str, found: str) -> None:
    """Checks that an operation that was cut short can be repeated."""
    operation = OPERATIONS[case.operation]
    with servers.connect(case.operation) as client:
        if found != "new":
            operation.act(client, name)
        assert operation.look(client, name) == "new"


def _look(servers: Servers, operation: Operation, case: Case, name: str) -> str:
    with servers.connect(case.operation) as client:
        return operation.look(client, name)


@pytest.mark.slow
@pytest.mark.parametrize(("failpoint", "transport"), _list_kills("control", kind="both"))
def test_server_when_it_dies_with_its_client_at_a_failpoint_then_what_the_table_states(
    servers: Servers, failpoint: str, transport: str, name: str
) -> None:
    case, operation = CASES[failpoint], OPERATIONS[CASES[failpoint].operation]
    with servers.connect(case.operation) as client:
        operation.prepare(client, name)
    servers.switch_on(f"{failpoint}:{case.nth}")
    with servers.begin(case.operation, transport, name) as child:
        servers.wait_died(case.server)
        child.kill()
    servers.start(case.server)
    found = _look(servers, operation, case, name)
    assert found in case.states
    if case.operation in ("create", "fill", "delete"):
        is_there = (found == "old") == (case.operation == "delete")
        assert len(servers.list_folders(name)) == is_there
    _check_usable(servers, case, name, found)


@pytest.mark.slow
@pytest.mark.parametrize(("failpoint", "transport"), _list_kills("control", kind="server"))
def test_call_when_its_server_dies_at_a_failpoint_then_it_ends_as_if_nothing_had_happened(
    servers: Servers, failpoint: str, transport: str, name: str
) -> None:
    case, operation = CASES[failpoint], OPERATIONS[CASES[failpoint].operation]
    with servers.connect(case.operation) as client:
        operation.prepare(client, name)
    servers.switch_on(f"{failpoint}:{case.nth}")
    with servers.begin(case.operation, transport, name) as child:
        servers.wait_died(case.server)
        servers.start(case.server)
        assert child.line() == "done"
    assert _look(servers, operation, case, name) == "new"


@pytest.mark.slow
@pytest.mark.parametrize(("failpoint", "transport"), _list_kills("worker", "writer", "client", kind="other"))
def test_worker_or_client_when_it_dies_at_a_failpoint_then_what_the_table_states(
    servers: Servers, failpoint: str, transport: str, name: str
) -> None:
    case, operation = CASES[failpoint], OPERATIONS[CASES[failpoint].operation]
    process = FAILPOINTS[failpoint].process
    dies = process == "client" or (process == "writer" and transport == "shm")
    with servers.connect(case.operation) as client:
        operation.prepare(client, name)
    servers.switch_on(f"{failpoint}:{case.nth}")
    with servers.begin(case.operation, transport, name, is_struck=dies) as child:
        outcome = child.line()
    assert servers.switch_off(), "no process has got there"
    assert (outcome == f"ended {-signal.SIGKILL}") == dies, outcome
    found = _look(servers, operation, case, name)
    assert found in (("new",) if outcome == "done" else case.states), outcome
    _check_usable(servers, case, name, found)


@pytest.mark.slow
@pytest.mark.parametrize(
    "failpoint",
    [pytest.param(name, marks=_mark(name, "recovery")) for name in CASES if name.startswith("recovery.")],
)
def test_recovery_when_it_is_cut_short_then_the_next_one_completes_it(
    servers: Servers, failpoint: str, name: str
) -> None:
    case, operation = CASES[failpoint], OPERATIONS[CASES[failpoint].operation]
    with servers.connect(case.operation) as client:
        operation.prepare(client, name)
    servers.switch_on(FIRST_CRASH[case.operation])
    with servers.begin(case.operation, "gloo", name) as child:
        servers.wait_died(0)
        child.kill()
    servers.switch_on(failpoint)
    with pytest.raises(tdserve.TDServeError):
        servers.start(0)
    assert servers.has_struck
    servers.start(0)
    assert _look(servers, operation, case, name) in case.states


@pytest.mark.slow
@pytest.mark.parametrize(
    "failpoint", [pytest.param(name, marks=_mark(name, "fails")) for name, each in FAILPOINTS.items() if each.fails]
)
def test_call_when_there_is_no_room_at_a_failpoint_then_all_or_nothing_and_the_next_one_succeeds(
    servers: Servers, failpoint: str, name: str
) -> None:
    case, operation = CASES[failpoint], OPERATIONS[CASES[failpoint].operation]
    transport = case.transports[0]
    with servers.connect(case.operation) as client:
        operation.prepare(client, name)
    servers.switch_on(f"{failpoint}=ENOSPC")
    with servers.begin(case.operation, transport, name, is_struck=FAILPOINTS[failpoint].process == "client") as child:
        outcome = child.line()
    assert servers.switch_off(), "no process has got there"
    assert outcome == ("CapacityError" if case.states == ("old",) else "done")
    found = _look(servers, operation, case, name)
    assert (found,) == case.states
    _check_usable(servers, case, name, found)


def test_failpoints_when_listed_then_each_has_a_case() -> None:
    assert list(CASES) == list(FAILPOINTS)
