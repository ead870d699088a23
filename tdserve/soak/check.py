"""Compares the final content of a server with the histories of its clients: no acknowledged write may be lost or
doubled."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tdserve.base.errors import CorruptDataError, EndOfStreamError, RemoteProtocolError
from tdserve.soak.history import Call, History, read_histories
from tdserve.soak.job_stories import MAX_STORIES, describe_job
from tdserve.soak.round_stores import (
    KEYS,
    SLOTS,
    TABLES,
    RoundStores,
    check_part,
    identify_rows,
    read_entry,
    read_slot_values,
)

LATE_S = 1.0
"""A call that ends later than this after its deadline counts as late."""

LEASE_ERRORS = ("SelectionError", "WrongStateError", "PeerLostError")
"""Errors of ``ack`` for rows whose lease ended with the session: these rows are back in the queue."""


@dataclass
class Findings:
    """The counts and faults of a findings.

    Attributes:
        counts: Number of compared things, by name.
        faults: The faults, as text.
        latest_s: How long after its deadline the latest of the calls with a short timeout ended, seconds.
    """

    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    latest_s: float = 0.0

    def add(self, other: Findings) -> None:
        """Adds the counts and faults of another."""
        self.counts.update(other.counts)
        self.faults += other.faults
        self.latest_s = max(self.latest_s, other.latest_s)

    def expect(self, holds: bool, fault: str) -> None:
        """Records a fault if a condition does not hold."""
        if not holds:
            self.faults.append(fault)


def check(stores: RoundStores, folder: Path) -> Findings:
    """Compares the histories in a folder with what the client of the stores reads now."""
    report = Findings()
    for path in sorted(folder.glob("fault-*.txt")):
        report.faults.append(f"{path.name}: {path.read_text()[-1500:]}")
    for name in TABLES:
        table = stores.open_table(name)
        parts = table.info().get("shards") or [table.info()]
        full = [number for number, part in enumerate(parts) if part["num_rows"] == part["capacity"]]
        report.expect(
            not full, f"parts {full} of {name!r} are full, and rows have made room for later ones: raise CAPACITY"
        )
        _check_table(report, name, identify_rows(name, table[:]), folder)
    for check_kind in (_check_slots, _check_keys, _check_weights, _check_queue, _check_entries, _check_made):
        check_kind(report, stores, folder)
    _count_sights(report, folder)
    return report


def _count(report: Findings, what: str, history: History) -> None:
    for call in history.calls:
        outcome = "acknowledged" if call.is_acknowledged else "failed" if call.failure else "cut short"
        report.counts[f"{what}: {outcome}"] += 1
        name = (call.failure or "").partition(":")[0]
        if call.failure and not (what == "acks" and name in LEASE_ERRORS):
            report.faults.append(f"{history.path.name}: {call.fields} failed: {call.failure}")


def _check_table(report: Findings, name: str, found: list[tuple[int, int]], folder: Path) -> None:
    stored = Counter(found)
    report.counts[f"rows of {name}"] = len(found)
    doubled = [row for row, times in stored.items() if times > 1]
    report.expect(not doubled, f"rows of {name!r} are there twice: {doubled[:10]}")
    called: set[tuple[int, int]] = set()
    for history in read_histories(folder, f"extend-{name}"):
        _count(report, f"extends of {name}", history)
        writer = _number_of(history)
        for call in history.calls:
            rows = [(writer, call.fields["first"] + row) for row in range(call.fields["num_rows"])]
            called.update(rows)
            lost = [row for row in rows if row not in stored]
            if call.is_acknowledged:
                report.expect(not lost, f"acknowledged rows of {name!r} are lost: {lost}")
            else:
                report.expect(len(lost) in (0, len(rows)), f"of an extend of {name!r}, {rows}, these are lost: {lost}")
    report.expect(
        stored.keys() <= called, f"rows of {name!r} that were never written: {list(stored.keys() - called)[:10]}"
    )


def _check_slots(report: Findings, stores: RoundStores, folder: Path) -> None:
    store = stores.client[stores.name(SLOTS)]
    final: list[int | None] = []
    for slot in range(store.batch_size[0]):
        try:
            final.append(read_slot_values(store[slot : slot + 1])[0])
        except CorruptDataError:
            final.append(None)
    last: dict[int, int] = dict.fromkeys(range(len(final)), 0)
    pending: dict[int, set[int]] = {slot: set() for slot in last}
    for history in read_histories(folder, "overwrite"):
        _count(report, "overwrites", history)
        for number, call in enumerate(history.calls, 1):
            _apply(call, last, pending)
            for seen in (seen for after, seen in history.sights if after == number):
                _check_slot(report, f"{history.path.name} saw", seen["slot"], seen["value"], last, pending)
    for slot, value in enumerate(final):
        _check_slot(report, "at the end", slot, value, last, pending)
    report.counts["slots damaged by a client that died in the middle"] = final.count(None)


def _apply(call: Call, last: dict[int, int], pending: dict[int, set[int]]) -> None:
    for slot in range(call.fields["first"], call.fields["last"]):
        if call.is_acknowledged:
            last[slot] = call.fields["value"]
        else:
            pending[slot].add(call.fields["value"])


def _check_slot(
    report: Findings, when: str, slot: int, value: int | None, last: dict[int, int], pending: dict[int, set[int]]
) -> None:
    """Checks that a slot has the value that was acknowledged last, or one whose writer received no answer."""
    report.counts["sights of slots"] += 1
    allowed = {last[slot], *pending[slot]} | ({None} if pending[slot] else set())
    report.expect(value in allowed, f"{when}: slot {slot} has {value}, acknowledged was {last[slot]}")


def _check_keys(report: Findings, stores: RoundStores, folder: Path) -> None:
    """Checks that each part is where the acknowledged calls have left it, or where one that was cut short would have
    moved it."""
    allowed: dict[int, set[str]] = {}
    into = {"add": "made", "rename": "named", "remove": "gone"}
    for history in read_histories(folder, "alter"):
        _count(report, "changes of keys", history)
        for call in history.calls:
            before = allowed.setdefault(call.fields["value"], {"gone"})
            allowed[call.fields["value"]] = (set() if call.is_acknowledged else before) | {into[call.fields["what"]]}
    found = stores.client.from_remote_init(stores.name(KEYS))
    for key in set(found.keys()) - {"x"}:
        state, _, number = str(key).partition(" ")
        report.counts["parts"] += 1
        try:
            check_part(found[key], int(number))
        except RemoteProtocolError as fault:
            report.faults.append(str(fault))
        report.expect(state in allowed.pop(int(number), ()), f"{KEYS!r} has {key!r}")
    for value, states in allowed.items():
        report.expect("gone" in states, f"part {value} of {KEYS!r} is lost: it should be {states}")


def _check_weights(report: Findings, stores: RoundStores, folder: Path) -> None:
    made: dict[tuple[str, int], int] = {}
    newest: dict[str, int] = {}
    calls = [(history, call) for history in read_histories(folder, "publish") for call in history.calls]
    for history in read_histories(folder, "publish"):
        _count(report, "publishes", history)
    for history, call in calls:
        if call.answer is None:
            continue
        name, version, identity = call.fields["name"], call.answer["answer"], call.fields["id"]
        report.expect(version > newest.get(name, 0), f"{history.path.name}: version {version} after {newest.get(name)}")
        newest[name] = version
        made[name, version] = identity
    called = {call.fields["id"] for _, call in calls}
    for history in read_histories(folder, "follow"):
        for _, seen in history.sights:
            report.counts["versions seen"] += 1
            key = (seen["name"], seen["version"])
            report.expect(seen["content"] == [float(seen["id"])], f"{history.path.name}: a mixed version {seen}")
            report.expect(seen["id"] in called, f"{history.path.name}: a version that was never published {seen}")
            known = made.setdefault(key, seen["id"])
            report.expect(known == seen["id"], f"version {key} is two: {known} and {seen}")
    for name, version in newest.items():
        weights = stores.client.latest(name)
        if weights is None:
            report.faults.append(f"{name}: there is no version, acknowledged was {version}")
            continue
        report.expect(weights.version >= version, f"{name}: newest is {weights.version}, acknowledged was {version}")
        identity = made.setdefault((name, weights.version), weights.metadata["id"])
        report.expect(weights.metadata["id"] == identity, f"{name}: version {weights.version} is not what it was")


def _check_queue(report: Findings, stores: RoundStores, folder: Path) -> None:
    queue = stores.open_queue()
    queue.close()  # from then on the remaining rows are handed out one by one to the last
    left: Counter[int] = Counter()
    rows_left: dict[int, list[tuple[int, int]]] = {}
    with suppress(EndOfStreamError):
        while True:
            with queue.take(500, timeout_s=30.0) as rows:
                left.update(rows["job"].tolist())
                for job, *row in zip(*(rows[name].tolist() for name in ("job", "index", "generation")), strict=True):
                    rows_left.setdefault(job, []).append((row[0], row[1]))
    report.counts["jobs left"] = left.total()
    acknowledged: Counter[int] = Counter()
    perhaps: Counter[int] = Counter()
    for history in read_histories(folder, "consume"):
        _count(report, "acks", history)
        for call in history.calls:
            (acknowledged if call.is_acknowledged else perhaps).update(call.fields["jobs"])
    called: set[int] = set()
    for history in read_histories(folder, "produce"):
        _count(report, "extends of jobs", history)
        for call in history.calls:
            called.update(call.fields["jobs"])
            if call.is_acknowledged:
                lost = [job for job in call.fields["jobs"] if not acknowledged[job] + perhaps[job] + left[job]]
                report.expect(not lost, f"jobs are lost: {lost}")
    twice = [job for job in called if acknowledged[job] + left[job] > 1]
    stories = [describe_job(job, folder, rows_left.get(job, [])) for job in twice[:MAX_STORIES]]
    report.expect(not twice, "\n".join([f"jobs were consumed, or stand in the queue, twice: {twice[:10]}", *stories]))
    report.expect({*acknowledged, *left} <= called, "jobs that no client put there")


def _check_entries(report: Findings, stores: RoundStores, folder: Path) -> None:
    """Checks that each entry is what its writer's calls have left: the last one acknowledged, or one without answer."""
    entries = stores.open_entries()
    allowed: dict[str, set[int]] = {}
    for history in read_histories(folder, "enter"):
        _count(report, "changes of entries", history)
        sights = dict(history.sights)
        for number, call in enumerate(history.calls, 1):
            key, value = call.fields["key"], call.fields["value"]
            allowed[key] = {value} | (set() if call.is_acknowledged else allowed.get(key, {0}))
            if number in sights:
                seen = sights[number]["value"]
                report.expect(seen in allowed[key], f"{history.path.name}: saw {seen}, allowed was {allowed[key]}")
    found = {key: read_entry(entries.get(key)) for key in entries.keys()}  # noqa: SIM118 (a call of the handle)
    report.counts["entries"] = len(found)
    for key, values in allowed.items():
        report.expect(found.get(key, 0) in values, f"entry {key!r} is {found.get(key, 0)}, allowed was {values}")
    report.expect(found.keys() <= allowed.keys(), f"entries that were never put: {found.keys() - allowed.keys()}")


def _count_sights(report: Findings, folder: Path) -> None:
    for history in read_histories(folder, "sample"):
        report.counts["samples"] += len(history.sights)
    late: list[float] = [seen["late_s"] for history in read_histories(folder, "hurry") for _, seen in history.sights]
    report.counts["calls in a hurry"] = len(late)
    report.counts["calls in a hurry that ended late"] = sum(each > LATE_S for each in late)
    report.latest_s = max([0.0, *late])


def _check_made(report: Findings, stores: RoundStores, folder: Path) -> None:
    begin = stores.name("made-")
    names = {name for name in stores.list_names() if name.startswith(begin)}
    known: dict[str, Call] = {}
    for history in read_histories(folder, "create"):
        _count(report, "creations and deletions", history)
        for call in history.calls:
            known[call.fields["name"]] = call
    for name, call in known.items():
        if not call.is_acknowledged:
            continue
        exists = call.fields["what"] == "create"
        report.expect((name in names) == exists, f"store {name!r} after {call.fields}: there is {name in names}")
        if exists and name in names:
            content = stores.client.from_remote_init(name)["count"].tolist()
            report.expect(content == [call.fields["count"]] * 3, f"store {name!r} has {content} after {call.fields}")
    report.expect(names <= known.keys(), f"stores that were never made: {names - known.keys()}")


def _number_of(history: History) -> int:
    return int(history.path.stem.rpartition("-")[2])
