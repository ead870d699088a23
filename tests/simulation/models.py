"""Stores of a simulation: the calls that clients make, and the checks of the answers.

Each model keeps the calls that were made of one store. It holds every answer against them, and what is left in the end.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from itertools import count
from typing import Any, ClassVar

from tdserve.base.errors import ConnectError, StoreExistsError, StoreNotFoundError, VersionConflictError
from tdserve.messages.row_numbers import decode_rows
from tdserve.messages.selection.selection import parse
from tdserve.v1 import control_pb2
from tests.simulation import content
from tests.simulation.calls import Call, Calls
from tests.simulation.simulated_client import SimulatedClient

TIMEOUT_S = 20.0
LONG_S = 120.0
"""Timeout of calls in the end, when nothing fails any more."""


class StoreModel(ABC):
    """One store.

    Args:
        name: Its name.
        chance: Decides what clients do.
        calls: The order of all calls.

    Attributes:
        outlasts_clients: Whether clients stay connected until the end, and it is whole all the same.
    """

    kind: ClassVar[str]

    def __init__(self, name: str, chance: random.Random, calls: Calls) -> None:
        self.outlasts_clients = False
        self.name = name
        self.chance = chance
        self.calls = calls
        self.identities = count(1)

    @abstractmethod
    async def prepare(self, client: SimulatedClient) -> None:
        """Creates it."""

    @abstractmethod
    async def act(self, client: SimulatedClient) -> None:
        """Makes one call, and checks its answer."""

    @abstractmethod
    async def finish(self, client: SimulatedClient) -> None:
        """Checks what is left, when nothing fails any more."""

    async def make(self, client: SimulatedClient, what: Any, timeout_s: float = TIMEOUT_S, **body: Any) -> Call[Any]:
        """Makes a call and waits for its end."""
        call = self.calls.begin(what)
        self.on_begun(call)
        return await self.calls.settle(call, client.call(timeout_s, **body))

    def on_begun(self, call: Call[Any]) -> None:
        """Called with each call of ``make`` before anything of it can happen."""
        return

    async def insist(self, client: SimulatedClient, what: Any, **body: Any) -> control_pb2.Done:
        """Makes a call that must succeed."""
        call = await self.make(client, what, LONG_S, **body)
        assert call.outcome == "done", f"{what} of {self.name} ended as {call.outcome}: {call.error}"
        return call.done

    async def delete(self, client: SimulatedClient) -> None:
        """Deletes it."""
        await self.insist(client, "delete", delete_store=control_pb2.DeleteStoreRequest(name=self.name))


class SlotsModel(StoreModel):
    """A tensordict store whose rows are overwritten."""

    kind = "slots"
    num_rows = 4
    spec = content.ROW.prepend((num_rows,))

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.writes: dict[int, Call[Any]] = {}  # by identity

    async def prepare(self, client: SimulatedClient) -> None:
        await self.insist(client, "create", create_store=content.new_tensordict(self.name, self.num_rows))

    async def act(self, client: SimulatedClient) -> None:
        if self.chance.random() < 0.6:
            first = self.chance.randrange(self.num_rows)
            last = self.chance.randint(first + 1, self.num_rows)
            identity = next(self.identities)
            asked = control_pb2.WriteRequest(
                store=self.name,
                selection=parse(slice(first, last)).to_message(),
                content=content.encode_content([identity] * (last - first), self.spec.fingerprint),
            )
            await self.make(client, (identity, range(first, last)), by_mail=self.chance.random() < 0.5, write=asked)
        else:
            await self._read(client)

    def on_begun(self, call: Call[Any]) -> None:
        if isinstance(call.what, tuple):
            self.writes[call.what[0]] = call

    async def finish(self, client: SimulatedClient) -> None:
        assert await self._read(client, LONG_S), "the last read failed"

    async def _read(self, client: SimulatedClient, timeout_s: float = TIMEOUT_S) -> bool:
        asked = control_pb2.ReadRequest(store=self.name, selection=content.ALL, fingerprint=self.spec.fingerprint)
        read = await self.make(client, "read", timeout_s, read=asked)
        if read.outcome == "done":
            found = content.decode_tensordict(self.spec, read.done)
            self._check(found, read)
        return read.outcome == "done"

    def _check(self, found: list[int], read: Call[Any]) -> None:
        for row, identity in enumerate(found):
            others = [each for each in self.writes.values() if row in each.what[1]]
            if identity == 0:
                late = [each.what for each in others if each.is_before(read)]
                assert not late, f"row {row} has nothing; acknowledged was {late}"
                continue
            write: Call[Any] = self.writes[identity]
            assert row in write.what[1], f"row {row} has {identity}, which was written elsewhere"
            assert write.outcome != "failed", f"{write.what} failed, and can be read"
            newer = [each.what for each in others if write.is_before(each) and each.is_before(read)]
            assert not newer, f"row {row} has {identity}; acknowledged after it was {newer}"
        for written in self.writes.values():  # whole: what nobody overwrote since is in all of its rows or in none
            rows = [row for row in written.what[1] if found[row] == written.what[0]]
            replaced = [found[row] for row in written.what[1] if found[row] != written.what[0]]
            if rows and replaced:
                overlapping = [self.writes[each] for each in replaced if each]
                assert len(overlapping) == len(replaced), f"{written.what} is half visible"
                assert not any(each.is_before(written) for each in overlapping), f"{written.what} is half visible"


class WeightsModel(StoreModel):
    """Published versions."""

    kind = "weights"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.publishes: dict[int, Call[Any]] = {}
        self.version_of: dict[int, int] = {}
        self.newest_seen: dict[bytes, int] = {}

    async def prepare(self, client: SimulatedClient) -> None:
        """Does nothing: the first version makes the store."""

    async def act(self, client: SimulatedClient) -> None:
        if self.chance.random() < 0.55:
            identity = next(self.identities)
            asked = control_pb2.PublishRequest(
                store=self.name,
                spec=content.ROW_MESSAGE,
                content=content.encode_content([identity], content.ROW.fingerprint, is_packed=True, is_single=True),
            )
            publish = await self.make(client, identity, publish=asked)
            if publish.outcome == "done":
                self._note(identity, publish.done.version)
        else:
            await self._read(client)

    def on_begun(self, call: Call[Any]) -> None:
        if isinstance(call.what, int):
            self.publishes[call.what] = call

    async def finish(self, client: SimulatedClient) -> None:
        await self._read(client, LONG_S)

    async def delete(self, client: SimulatedClient) -> None:
        if self.version_of:
            await super().delete(client)

    async def _read(self, client: SimulatedClient, timeout_s: float = 0.5) -> None:
        read = await self.make(client, "latest", timeout_s, latest=control_pb2.LatestRequest(store=self.name))
        acknowledged = [self.version_of[each] for each, call in self.publishes.items() if call.is_before(read)]
        if read.outcome != "done":
            is_answered = read.outcome == "failed" and not isinstance(read.error, ConnectError)
            assert not (acknowledged and is_answered), f"a published version is gone: {read.error}"
            return
        version = read.done.accepted.version
        (identity,) = content.decode_tensordict(content.ROW, read.done, is_packed=True)
        assert self.publishes[identity].outcome != "failed", f"version {version} failed, and can be read"
        self._note(identity, version)
        assert version >= max(acknowledged, default=0), f"version {version} after {max(acknowledged)}"
        assert version >= self.newest_seen.get(client.client_id, 0), "a version went back"
        self.newest_seen[client.client_id] = version

    def _note(self, identity: int, version: int) -> None:
        assert self.version_of.setdefault(identity, version) == version, f"{identity} was published twice"
        assert len(set(self.version_of.values())) == len(self.version_of), f"version {version} has two contents"


class KeyedModel(StoreModel):
    """Entries that are put, also on the condition of a version, and removed."""

    kind = "keyed"
    keys = (b"x", b"y")

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.puts: dict[int, Call[Any]] = {}
        self.version_of: dict[tuple[bytes, int], int] = {}
        self.removals: list[Call[Any]] = []

    async def prepare(self, client: SimulatedClient) -> None:
        await self.insist(client, "create", create_store=content.new_keyed(self.name))

    async def act(self, client: SimulatedClient) -> None:
        by_mail, choice = self.chance.random() < 0.5, self.chance.random()
        if choice < 0.1:
            removal = self.calls.begin("remove")
            self.removals.append(removal)
            asked = control_pb2.RemoveRequest(
                store=self.name, fingerprint=content.KEYED_FINGERPRINT, keys=self.keys, skips_missing=True
            )
            await self.calls.settle(removal, client.call(TIMEOUT_S, by_mail=by_mail, remove=asked))
            return
        found = await self._get(client)
        if choice < 0.6 and found is not None:
            await self._put(client, found, is_conditional=choice < 0.35, by_mail=by_mail)

    async def _put(
        self, client: SimulatedClient, found: list[tuple[int, int]], *, is_conditional: bool, by_mail: bool
    ) -> None:
        identity = next(self.identities)
        asked = control_pb2.PutRequest(
            store=self.name,
            fingerprint=content.KEYED_FINGERPRINT,
            keys=self.keys,
            if_versions=[version for _, version in found] if is_conditional else [],
            content=content.encode_records([identity, identity]),
        )
        condition = tuple(version for _, version in found) if is_conditional else None
        put = await self.make(client, (identity, condition), by_mail=by_mail, put=asked)
        if put.outcome == "done":
            for place, key in enumerate(self.keys):
                self._note(key, identity, put.done.version + place)
            self._check_conditions()
        elif put.outcome == "failed" and isinstance(put.error, VersionConflictError):
            others = [each for each in (*self.puts.values(), *self.removals) if each is not put]
            assert is_conditional, "a put without condition met a conflict"
            assert any(not each.is_before(put) or each.outcome != "failed" for each in others), "nobody else put"

    def on_begun(self, call: Call[Any]) -> None:
        if isinstance(call.what, tuple):
            self.puts[call.what[0]] = call

    def _check_conditions(self) -> None:
        """Of the puts with one condition only one succeeds."""
        conditions = [each.what[1] for each in self.puts.values() if each.outcome == "done" and any(each.what[1] or ())]
        assert len(set(conditions)) == len(conditions), f"two puts have replaced the same versions: {conditions}"

    def _note(self, key: bytes, identity: int, version: int) -> None:
        known = self.version_of.setdefault((key, identity), version)
        assert known == version, f"{identity} was put twice: versions {known} and {version}"

    async def finish(self, client: SimulatedClient) -> None:
        assert await self._get(client, LONG_S) is not None

    async def _get(self, client: SimulatedClient, timeout_s: float = TIMEOUT_S) -> list[tuple[int, int]] | None:
        versions = control_pb2.GetRequest(
            store=self.name, fingerprint=content.KEYED_FINGERPRINT, keys=self.keys, asks_versions=True
        )
        looked = await self.make(client, "versions", timeout_s, get=versions)
        if looked.outcome != "done":
            return None
        if not all(version for _, version in content.decode_records_or_versions(looked.done)):
            return [(0, version) for _, version in content.decode_records_or_versions(looked.done)]
        asked = control_pb2.GetRequest(store=self.name, fingerprint=content.KEYED_FINGERPRINT, keys=self.keys)
        read = await self.make(client, "get", 0.0, get=asked)
        if read.outcome != "done":
            return None
        found = content.decode_records(read.done)
        assert len({identity for identity, _ in found}) == 1, f"a put is half visible: {found}"
        identity = found[0][0]
        assert self.puts[identity].outcome != "failed", (
            f"{identity} failed ({self.puts[identity].error}), and can be read"
        )
        for key, (_, version) in zip(self.keys, found, strict=True):
            self._note(key, identity, version)
            older = [
                each.what
                for each in self.puts.values()
                if each.is_before(read) and self.version_of[key, each.what[0]] > version
            ]
            assert not older, f"version {version} is read after {older} was acknowledged"
        return found


class NamesModel(StoreModel):
    """A name that is created and deleted again and again; each incarnation has a capacity of its own."""

    kind = "names"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.changes: list[Call[Any]] = []

    async def prepare(self, client: SimulatedClient) -> None:
        """Does nothing: the name is free."""

    def on_begun(self, call: Call[Any]) -> None:
        if call.what != "describe":
            self.changes.append(call)

    async def act(self, client: SimulatedClient) -> None:
        choice = self.chance.random()
        if choice < 0.5:
            number = next(self.identities)
            asked = content.new_tensordict(self.name, number)
            if self.chance.random() < 0.5:  # too large for the catalog: it has files from the beginning
                asked.spec.CopyFrom(content.make_large(number))
            made = await self.make(client, ("create", number), create_store=asked)
            if made.outcome == "failed":
                self._check_refusal(made, StoreExistsError, "create")
        elif choice < 0.8:
            gone = await self.make(client, ("delete", 0), delete_store=control_pb2.DeleteStoreRequest(name=self.name))
            if gone.outcome == "failed":
                self._check_refusal(gone, StoreNotFoundError, "delete")
        else:
            await self._look(client)

    def _check_refusal(self, call: Call[Any], error: type[Exception], what: str) -> None:
        """Checks that a refused change has a reason: another call that made it, and was not undone for certain."""
        if not isinstance(call.error, error):
            return
        others = [each for each in self.changes if each is not call and each.what[0] == what]
        reasons = [each for each in others if each.outcome != "failed" or each.ended > call.begun]
        if what == "delete":  # or nobody has created it
            created = [each for each in self.changes if each.what[0] == "create" and each.is_before(call)]
            if not created:
                return
        assert reasons, f"{call.what} was refused without a reason: {call.error}"

    async def finish(self, client: SimulatedClient) -> None:
        await self._look(client, LONG_S)

    async def _look(self, client: SimulatedClient, timeout_s: float = TIMEOUT_S) -> None:
        asked = control_pb2.CatalogRequest(describe_store=control_pb2.DescribeStoreRequest(name=self.name))
        look = await self.make(client, "describe", timeout_s, catalog=asked)
        deletions = [each for each in self.changes if each.what[0] == "delete" and each.outcome != "failed"]
        creations = [each for each in self.changes if each.what[0] == "create" and each.outcome != "failed"]
        if look.outcome == "done":
            assert creations, "a store is there that nobody has created"
            certain = [each for each in deletions if each.is_before(look)]
            if certain:
                last = max(certain, key=lambda each: each.ended)
                possible = [each for each in creations if not each.is_before(last)]
                assert possible, f"a store is there that was deleted: {last.what}"
        elif isinstance(look.error, StoreNotFoundError):
            made = [each for each in creations if each.is_before(look)]
            if made:
                last = max(made, key=lambda each: each.ended)
                possible = [each for each in deletions if not each.is_before(last)]
                assert possible, f"a store is gone that nobody has deleted: {last.what}"

    async def delete(self, client: SimulatedClient) -> None:
        asked = control_pb2.DeleteStoreRequest(name=self.name)
        gone = await self.make(client, ("delete", 0), LONG_S, delete_store=asked)
        assert gone.outcome == "done" or isinstance(gone.error, StoreNotFoundError), gone.error


def read_numbers(done: control_pb2.Done) -> list[int]:
    """Returns the row numbers of an answer to an extend."""
    numbers: list[int] = decode_rows(done.indices).tolist()
    return numbers
