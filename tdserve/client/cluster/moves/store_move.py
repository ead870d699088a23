"""Moves a store from one server of a cluster to another, while others use it.

Its files are copied while it serves, and again what has changed since. Then it is sealed: its clients wait, and
what is left is copied, with all that is on record of it. Once the source releases it, the target has it. After an
earlier crash the store stays at the source; after a later one the next request completes the move.

``server/README.md`` has a reading order of moves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from tdserve.base.deadline import Deadline
from tdserve.base.errors import (
    ConnectError,
    DeadlineExceededError,
    InvalidRequestError,
    PeerLostError,
    StoreNotFoundError,
    TDServeError,
    TransportError,
    WrongStateError,
)
from tdserve.base.failpoints import reach
from tdserve.base.ids import make_uid
from tdserve.base.integers import check_integer
from tdserve.client.cluster.moves.cut_short_moves import finish_cut_short
from tdserve.client.cluster.servers.cluster_servers import ClusterServers
from tdserve.client.cluster.servers.directory import Directory
from tdserve.client.cluster.servers.members import Members
from tdserve.client.cluster.servers.part_errors import note_elsewhere
from tdserve.client.cluster.servers.placement_records import delete_copy, record_copy
from tdserve.client.moves.file_passes import FilePasses, make_block
from tdserve.client.moves.move_steps import MAX_ATTEMPTS, UNDO_S, request_step
from tdserve.client.session.calls.call_deadline import within
from tdserve.client.session.calls.reach import reach_within
from tdserve.messages.changed_blocks import count_changed_bytes
from tdserve.rules.placement import PlacementRecord, find_whole, name_part, name_splits, order_servers
from tdserve.v1 import control_pb2

REBALANCE_TIMEOUT_S = 3600.0
"""Default timeout of a move: that of a large store takes minutes."""

MAX_PASSES = 3
"""Passes over the files while the store serves: a store that is written to all the time changes in every one."""

SMALL_BYTES = 32 << 20
"""So much change since the last pass is copied within a tenth of a second or so: the store is sealed then."""

MAX_NAMED_LEFT = 20
"""At most this many stores are named that could not leave a server that is drained."""

MOVE_REACH_S = 4.0
"""How long a step tries to reach its server. One that restarts is back by then; clients of a sealed store wait."""

SEAL_TIMEOUT_S = 10.0
"""Time for writes under way to end once the store is sealed. A client that was stopped while it wrote holds it up."""


class MoveProgress(NamedTuple):
    """How far a move has come.

    Attributes:
        nbytes: Bytes that were compared in this pass.
        total_nbytes: Bytes that may have changed since the pass before.
        copied_nbytes: Bytes that were copied in all passes.
        is_sealed: Whether clients wait.
    """

    nbytes: int
    total_nbytes: int
    copied_nbytes: int
    is_sealed: bool


OnProgress = Callable[[MoveProgress], None]

_Ask = Callable[..., control_pb2.MoveAnswer]


def move_store(
    cluster: ClusterServers, name: str, target: int | None, *, on_progress: OnProgress, deadline: Deadline
) -> int:
    """Moves a store, or a part of one; does nothing if it is there.

    Args:
        target: Number of the server; None: the one that the name's hash chooses.

    Returns:
        The server that has it now.

    Raises:
        StoreNotFoundError: There is no such store.
        NotSupportedError, StoreExistsError, CapacityError: It cannot move there. Nothing was changed.
        DeadlineExceededError: A client's writes did not end in time. Nothing was changed.
        ConnectError: A server does not answer; within seconds, whatever the deadline is. The store is where it was,
            unless the source was lost as it released the store: then it may be there.
    """
    members, directory = cluster.members, cluster.directory
    target = directory.get_owner(name) if target is None else target
    check_integer("server", target, 0, maximum=len(members) - 1)
    whole = find_whole(name)
    if whole is not None and name == name_splits(whole):
        raise InvalidRequestError(argument="name", reason=f"{name!r} moves with {name_part(whole, 0)!r}")
    num_attempts = 0
    while True:
        num_attempts += 1
        directory.forget(name)
        place = directory.find(name, deadline)
        if place.placement is not None:
            parts = f"{name_part(name, 0)!r} ... {name_part(name, place.placement.num_shards - 1)!r}"
            reason = f"{name!r} has parts on several servers, which move one by one: {parts}"
            raise InvalidRequestError(argument="name", reason=reason)
        try:
            with reach_within(MOVE_REACH_S), within(deadline):
                if whole is None:
                    _move_whole(cluster, name, place.server, target, on_progress, deadline)
                else:
                    _move_part(cluster, whole, name, place.server, target, on_progress, deadline)
            directory.forget(name)
            return target
        except (StoreNotFoundError, WrongStateError) as error:  # another client has moved it, or a server started again
            if deadline.expired or num_attempts == MAX_ATTEMPTS:
                if isinstance(error, StoreNotFoundError) and members.lost:
                    raise members.explain_not_asked(members.lost[0], f"which may have {name!r}") from error
                raise


def _move_whole(
    cluster: ClusterServers, name: str, source: int, target: int, on_progress: OnProgress, deadline: Deadline
) -> None:
    if source == target:
        cluster.members.get(source).catalog.get_fingerprint(name, deadline)  # it exists
        return
    move = _Copying(cluster, name, source, target, on_progress, deadline).run()
    owner = cluster.directory.get_owner(name)
    if owner not in (source, target):
        forward = PlacementRecord.make_forward(target, move)
        try:
            request_step(cluster.members.get(owner), name, place=forward.to_json(), deadline=deadline)
        except TransportError as error:  # its record leads to the source, and that one's to the target
            cluster.members.note_unreached(owner, error)


def _move_part(
    cluster: ClusterServers,
    whole: str,
    name: str,
    source: int,
    target: int,
    on_progress: OnProgress,
    deadline: Deadline,
) -> None:
    """Moves a part, and has the record of the whole name its new server; also if only that is left to do."""
    directory, shard = cluster.directory, int(name.rpartition("#")[2])
    directory.forget(whole)
    record = directory.find(whole, deadline).placement
    if record is None or shard >= record.num_shards:
        raise StoreNotFoundError(name=name)
    if record.is_copy and record.owner is not None:
        if not cluster.members.is_lost(record.owner):
            state = f"server {record.owner} has lost the record of {whole!r}"
            raise WrongStateError(state=state, event="moving a part; create the store again with exists_ok=True")
        reason = f"server {record.owner} has the record of {whole!r}, which a move changes, and does not answer"
        raise ConnectError(address=cluster.members.describe_address(record.owner), reason=reason)
    places = _find_parts(directory, whole, record, deadline)
    if target in (*places[:shard], *places[shard + 1 :]):
        raise WrongStateError(state=f"server {target} has another part of {whole!r}", event=f"moving {name!r} there")
    if source != target:
        splits = name_splits(whole)
        if shard == 0 and splits in cluster.members.get(source):  # how draws are divided is kept where shard 0 is
            _Copying(cluster, splits, source, target, on_progress, deadline).run()
        _Copying(cluster, name, source, target, on_progress, deadline).run()
    _mend_record(cluster, whole, deadline)


def _find_parts(directory: Directory, whole: str, record: PlacementRecord, deadline: Deadline) -> tuple[int, ...]:
    """Finds the servers of all parts of a store, of which the record may be older; a part that no server shows now is
    where the record has it."""
    places = [directory.find_again(name_part(whole, shard), deadline) for shard in range(record.num_shards)]
    return tuple(known if place is None else place.server for place, known in zip(places, record.servers, strict=True))


def _mend_record(cluster: ClusterServers, whole: str, deadline: Deadline) -> None:
    """Makes the record of a shared store name the servers that have its parts."""
    directory = cluster.directory
    while True:
        directory.forget(whole)
        place = directory.find(whole, deadline)
        record = place.placement
        if record is None:
            raise StoreNotFoundError(name=whole)
        found = _find_parts(directory, whole, record, deadline)
        # With two moves at once a server may have two parts for a moment: these are found by asking.
        if found == record.servers or len(set(found)) < len(found):
            return
        mended = replace(record, servers=found, revision=record.revision + 1)
        try:
            asked = {"place": mended.to_json(), "expected": record.to_json()}
            request_step(cluster.members.get(place.server), whole, deadline=deadline, **asked)
            _mend_copies(cluster.members, whole, record, mended)
        except WrongStateError:  # another part has moved at the same time
            if deadline.expired:
                raise


def _mend_copies(members: Members, whole: str, before: PlacementRecord, after: PlacementRecord) -> None:
    """Gives the servers that have the parts now copies of the record. An older copy leads to the server that a part has
    left, and from there on."""
    copies = after.list_copies()
    calls = {server: partial(record_copy, members, whole, server, copy) for server, copy in copies.items()}
    left = before.list_copies().keys() - copies.keys()
    members.ask_all({**calls, **{server: partial(delete_copy, members, whole, server) for server in left}})


def choose_refuge(cluster: ClusterServers, name: str, drained: int) -> int:
    """Returns the server that gets a store of a server that is drained: the one that would have it if that did not
    exist, nor those that do not answer; for a part, one that has no other part.

    Raises:
        WrongStateError: All servers have a part.
        ConnectError: None of those that may have it answers.
    """
    whole, record = find_whole(name), None
    if whole is not None:
        cluster.directory.forget(whole)  # one of its parts may have moved
        record = cluster.directory.find(whole).placement
    taken = {drained, *(() if record is None else record.servers)}
    lost: ConnectError | None = None
    for server in order_servers(name, len(cluster.members)):
        if server in taken:
            continue
        try:
            cluster.members.check_answers(server, f"to which {name!r} would move")
            return server
        except ConnectError as error:
            lost = lost or error
    raise lost or WrongStateError(state=f"every server has a part of {whole!r}", event=f"moving {name!r}")


def explain_left(failures: Mapping[str, TDServeError], drained: int) -> TDServeError:
    """Returns the error of stores that could not move away from a server, by name: the first, with all names if there
    are several."""
    left, first = list(failures), next(iter(failures.values()))
    more = f" and {len(left) - MAX_NAMED_LEFT} more" if len(left) > MAX_NAMED_LEFT else ""
    names = ", ".join(map(repr, left[:MAX_NAMED_LEFT]))
    return note_elsewhere(first, "" if len(left) == 1 else f"still on server {drained}: {names}{more}")


@dataclass
class _Copying:
    cluster: ClusterServers
    name: str
    source: int
    target: int
    on_progress: OnProgress
    deadline: Deadline
    copied_nbytes: int = 0
    may_be_released: bool = False
    passes: FilePasses = field(default_factory=FilePasses)

    def run(self) -> str:
        """Moves the store; returns the id of the move."""
        at_source = partial(self._ask, self.source, f"from which {self.name!r} moves")
        at_target = partial(self._ask, self.target, f"to which {self.name!r} moves")
        self.cluster.members.check_answers(self.source, f"from which {self.name!r} moves")
        self.cluster.members.check_answers(self.target, f"to which {self.name!r} moves")
        finish_cut_short(self.cluster.members, self.name, (self.source, self.target))
        move = make_uid()
        target = partial(at_target, move=move, deadline=self.deadline)
        try:
            uid = self._copy_while_served(at_source, target, move)
            seal = partial(at_source, uid=uid, move=move, deadline=self.deadline)
            self._copy_sealed(seal, target)
        except BaseException:
            if not self.may_be_released:
                with suppress(TDServeError):  # otherwise it goes with this client
                    at_target(give_up=True, move=move, deadline=Deadline.after(UNDO_S))
            raise
        reach("move.handed-over")
        target(show=True)
        return move

    def _copy_while_served(self, at_source: _Ask, target: _Ask, move: str) -> str:
        """Copies the files until little changes between two passes; returns the incarnation of the store."""
        for _ in range(MAX_PASSES):
            listed = at_source(list_files=True, move=move, deadline=self.deadline)
            source = partial(at_source, uid=listed.uid, deadline=self.deadline)
            target(receive=listed.files, continues=self.passes.has_begun)
            copied_nbytes = self._copy(source, target, listed.files)
            target(sync=True)
            if copied_nbytes <= SMALL_BYTES:
                break
        return listed.uid

    def _copy_sealed(self, source: _Ask, target: _Ask) -> None:
        """Copies what is left while clients wait, and hands the store over."""
        try:
            sealed = self._seal(source)
            target(receive=sealed.files, continues=self.passes.has_begun)
            self._copy(source, target, sealed.files, is_sealed=True)
            target(complete=sealed.store)
            self._check_time()
            self._release(source)
        except BaseException:
            with suppress(TDServeError):  # a session that is lost unseals it, too; what was released stays so
                source(unseal=True, deadline=Deadline.after(UNDO_S))
            raise

    def _seal(self, source: _Ask) -> control_pb2.MoveAnswer:
        try:
            return source(seal=True, deadline=Deadline.after(self.deadline.limit(SEAL_TIMEOUT_S)))
        except DeadlineExceededError:  # of writes, unless the server hangs
            self.cluster.members.check_answers(self.source, f"from which {self.name!r} moves")
            raise

    def _release(self, source: _Ask) -> None:
        self.may_be_released = True
        try:
            source(release=self.target)
        except (WrongStateError, StoreNotFoundError):  # the seal was lost before
            self.may_be_released = False
            raise

    def _ask(self, server: int, role: str, **step: Any) -> control_pb2.MoveAnswer:
        """Asks one of both servers for one step.

        Raises:
            ConnectError: It was not reached; the error names it.
        """
        members = self.cluster.members
        try:
            return request_step(members.get(server), self.name, **step)
        except (ConnectError, PeerLostError) as error:
            if not error.retryable:
                raise
            members.note_lost(server, error)
            raise members.explain_lost(server, role, error) from error

    def _copy(
        self,
        source: _Ask,
        target: _Ask,
        files: control_pb2.FileSizes,
        *,
        is_sealed: bool = False,
    ) -> int:
        """Copies the blocks that have changed since the last pass; returns their bytes."""
        before, seen_nbytes, total_nbytes = self.copied_nbytes, 0, count_changed_bytes(files)

        def read(asked: control_pb2.FileBlocks) -> control_pb2.FileBlocks:
            self._check_time()
            return source(read=asked).blocks

        for blocks in self.passes.read(files, read):
            changed = [block for block in blocks if block.content is not None]
            if changed:
                target(write=control_pb2.FileBlocks(blocks=map(make_block, changed)))
            self.copied_nbytes += sum(block.nbytes for block in changed)
            seen_nbytes += sum(block.nbytes for block in blocks)
            self.on_progress(MoveProgress(seen_nbytes, total_nbytes, self.copied_nbytes, is_sealed))
        return self.copied_nbytes - before

    def _check_time(self) -> None:
        if self.deadline.expired:
            what = f"the move of {self.name!r} to server {self.target}"
            raise DeadlineExceededError(what=what, timeout_s=self.deadline.timeout_s)
