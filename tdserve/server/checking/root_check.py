"""Checks all files of a root that no server holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from tdserve.base.errors import CorruptDataError, TDServeError, WrongStateError
from tdserve.rules.catalog import StoreRecord
from tdserve.server.catalog.later_records import LaterRecord, find_later
from tdserve.server.checking import set_aside
from tdserve.server.checking.catalog_check import check_catalog
from tdserve.server.checking.catalog_repairs import (
    forget_catalog_copy,
    read_records,
    remove_file,
    take_back,
    take_later,
)
from tdserve.server.checking.findings import CheckedRoot, Finding, Progress, try_repair
from tdserve.server.checking.repair_process import run_apart
from tdserve.server.checking.row_check import check_rows
from tdserve.server.checking.version_check import check_versions
from tdserve.server.durability.power_loss import return_to_last_sync
from tdserve.server.kinds.all_kinds import KINDS
from tdserve.server.open_store.specs import Specs
from tdserve.store.database.catalog_db import CatalogDB
from tdserve.store.database.changed_byte import find_changed_byte
from tdserve.store.database.environments import DATA_FILE
from tdserve.store.disk.faults import convert_os_errors
from tdserve.store.disk.files import FRESH_SUFFIX, SET_ASIDE
from tdserve.store.durability.environment_scan import EnvironmentScanner
from tdserve.store.durability.sync_pass import COPY_FILE
from tdserve.store.roots.file_sums import FILE_NAME as SUMS_FILE, compute_file_checksum, is_own, read_sums, record_sums
from tdserve.store.roots.record_file import FILE_NAME as RECORD_FILE, KeptRecord
from tdserve.store.roots.root import Root

MAX_ROUNDS = 3
"""Most times that a root is repaired and checked again: a file that has its size again shows which rows are gone."""


@dataclass(frozen=True)
class RootReport:
    """What a check has found.

    Attributes:
        findings: What is wrong, repaired or not.
        progress: How much was read.
        is_orderly: Whether the last server ended in order, so that every byte could be compared.
    """

    findings: tuple[Finding, ...]
    progress: Progress
    is_orderly: bool

    @property
    def num_damaged(self) -> int:
        """Number of faults that are not repaired, or whose repair has lost content."""
        return sum(each.is_damage and (not each.repaired or len(each.losses) > 0) for each in self.findings)

    @property
    def num_not_served(self) -> int:
        """Number of the faults that are stores of which nothing is in service."""
        return sum(each.is_not_served and not each.repaired for each in self.findings)


def check_root(
    path: Path, *, repairs: bool = False, on_progress: Callable[[Progress], None] = lambda _: None
) -> RootReport:
    """Compares everything in a root with its checksums. No server may hold it.

    Args:
        path: The root.
        repairs: Whether to repair what can be.
        on_progress: Called after each part.

    Raises:
        RootInUseError, InvalidRequestError: There is no root, or a server has it.
        CorruptDataError: It has another format version.
        WrongStateError: The machine has lost its power since, or a repair was interrupted, and this is no repair.
            Nothing was changed.
    """
    root = Root.acquire_for_check(path)
    try:
        done: list[Finding] = []
        if root.run.has_lost_power() and not _is_run_damaged(root):
            if not repairs:
                state = f"{root.path} was not recovered since the machine lost its power, or a repair was interrupted"
                event = "checking it without --repair, or before a server has started there"
                raise WrongStateError(state=state, event=event)
            done.append(_recover(root))
        with EnvironmentScanner() as scanner:
            done += [_repair(each) for each in _list_changed_bytes(root)] if repairs else []
            report = _check(root, scanner, on_progress)
            failed = dict[tuple[str, str], str]()
            for _ in range(MAX_ROUNDS if repairs else 0):
                repaired = [_repair(each) for each in report.findings if each.repair is not None]
                failed |= {(each.path, each.reason): each.remedy for each in repaired if not each.repaired}
                if not any(each.repaired for each in repaired):
                    break
                done += [each for each in repaired if each.repaired and not each.is_set_aside]
                _record_sums(root, report, repaired)
                report = _check(root, scanner, on_progress)
        left = [replace(each, remedy=failed.get((each.path, each.reason), each.remedy)) for each in report.findings]
        return replace(report, findings=(*done, *left))
    finally:
        root.release()


def _recover(root: Root) -> Finding:
    """Does what the next start of a server would do first."""
    losses = return_to_last_sync(root)
    root.run.note(is_synced=False)
    reason = "the machine lost its power, or a repair was interrupted, before all was synced"
    return Finding("run.json", reason, repaired="all is as of the last sync", losses=losses)


def _repair(finding: Finding) -> Finding:
    assert finding.repair is not None  # noqa: S101 (the caller has chosen those that have one)
    outcome, reason = try_repair(finding.repair)
    return replace(
        finding,
        repaired=outcome.done,
        losses=outcome.losses,
        is_set_aside=outcome.is_set_aside,
        remedy=reason or finding.remedy,
    )


def _record_sums(root: Root, report: RootReport, repaired: list[Finding]) -> None:
    """Records the checksums of what was repaired; those of what is still damaged stay."""
    if report.is_orderly:
        whole = {each.path for each in repaired if each.repaired}
        damaged = {each.path for each in report.findings if each.is_damage} - whole
        record_sums(root.path, keeps=damaged, rereads=True)


def _check(root: Root, scanner: EnvironmentScanner, show: Callable[[Progress], None]) -> RootReport:
    """Checks a root once; changes nothing."""
    is_orderly, is_run_damaged = root.run.has_ended_in_order(), _is_run_damaged(root)
    progress, changed, misleading = Progress(), dict[str, str](), set[str]()
    findings = list[Finding]()
    if is_orderly or is_run_damaged:
        findings += _compare_sums(root, changed, misleading, progress)
    if is_run_damaged:
        is_orderly = not changed
        findings.append(_describe_run(root, is_orderly=is_orderly))
        changed, misleading = (changed, misleading) if is_orderly else ({}, set())
    findings += _check_own_files(root, scanner)
    found, is_readable = check_catalog(root, changed, misleading, scanner)
    findings += found
    if is_readable:
        with CatalogDB(root.catalog_folder, is_read_only=True) as db:
            checked = CheckedRoot(root, db, Specs(db, set), changed, misleading, scanner, progress, show)
            records = read_records(db)
            progress.num_stores = len(records)
            for record in records:
                progress.store = record.name
                findings += _check_store(checked, record)
                progress.num_checked += 1
                show(progress)
            findings += _list_strangers(checked, {key.decode() for key in db.list_keys("stores")})
            for name, reason in checked.changed.items():  # of no store that is known
                findings.append(Finding(name, reason))
    return RootReport(tuple(findings), progress, is_orderly)


def _check_own_files(root: Root, scanner: EnvironmentScanner) -> Iterator[Finding]:
    try:
        root.check_format()
    except TDServeError as error:
        yield Finding("tdserve.json", str(error), repair=partial(_repair_format, root))
    copy = root.synced_folder / COPY_FILE
    if copy.exists():
        found = scanner.scan(copy)
        if found.failure or found.damaged or found.broken_page:
            reason = found.failure or found.broken_page or f"{len(found.damaged)} damaged records"
            name = str(copy.relative_to(root.path))
            yield Finding(name, f"{reason}; it is a copy", repair=partial(forget_catalog_copy, root))


def _is_run_damaged(root: Root) -> bool:
    try:
        root.run.check()
    except TDServeError:
        return True
    return False


def _describe_run(root: Root, *, is_orderly: bool) -> Finding:
    """Returns the finding of a damaged record of the last run, which shows whether that ended in order."""
    reason = "damaged: it does not tell whether the last server ended in order"
    if not is_orderly:
        return Finding("run.json", reason, remedy="the next server goes back to the last sync, and writes it again")

    def repair() -> str:
        root.run.note(is_synced=True)
        return "the last server ended in order: no file was written since"

    return Finding("run.json", reason, repair=repair)


def _repair_format(root: Root) -> str:
    root.repair_format()
    return "it was written again"


def _compare_sums(root: Root, changed: dict[str, str], misleading: set[str], progress: Progress) -> Iterator[Finding]:
    """Adds the files to ``changed`` that are not as the last server has left them, or to ``misleading``."""
    path = root.synced_folder / SUMS_FILE
    try:
        sums = read_sums(root.path)
        if not sums:
            raise CorruptDataError(path=str(path), expected="checksums of the last orderly end", actual="none")
    except TDServeError as error:
        yield Finding(str(path.relative_to(root.path)), str(error), repair=partial(_record_again, root))
        return
    for name, known in sums.items():
        file = root.path / name
        if not file.is_file():
            changed[name] = "the file is gone"
        elif file.stat().st_size != known.nbytes:
            changed[name] = f"{file.stat().st_size} bytes instead of {known.nbytes}"
        elif (found := compute_file_checksum(file)) != known.checksum:
            changed[name] = f"checksum {found:08x} instead of {known.checksum:08x}"
            if byte := _describe_changed_byte(root, name, known.checksum):
                misleading.add(name)
                del changed[name]
                yield byte
        progress.nbytes += file.stat().st_size if file.is_file() else 0
    copy = str((root.synced_folder / COPY_FILE).relative_to(root.path))
    if copy in changed:
        reason = f"{changed.pop(copy)}; it is a copy"
        yield Finding(copy, reason, repair=partial(forget_catalog_copy, root))
    changed.pop("tdserve.json", None)  # it has a checksum of its own


def _list_changed_bytes(root: Root) -> Iterator[Finding]:
    """Yields what is put back before anything else is looked at: until then, earlier records may take the place of the
    last ones."""
    if not root.run.has_ended_in_order():
        return
    with suppress(TDServeError):  # which is found again
        for name, known in read_sums(root.path).items():
            file = root.path / name
            if file.name != DATA_FILE or not file.is_file() or compute_file_checksum(file) == known.checksum:
                continue
            if byte := _describe_changed_byte(root, name, known.checksum):
                yield byte


def _describe_changed_byte(root: Root, name: str, checksum: int) -> Finding | None:
    """Returns the finding of a file of LMDB of which one byte has changed that leads to the records."""
    path = root.path / name
    byte = find_changed_byte(path, checksum) if path.name == DATA_FILE else None
    if byte is None:
        return None

    def repair() -> str:
        byte.put_back(path)
        return f"it is {byte.value} again, and the file as it was"

    return Finding(name, f"byte {byte.offset}, which leads to its records, has changed", repair=repair)


def _record_again(root: Root) -> str:
    with convert_os_errors(root.synced_folder):
        root.synced_folder.mkdir(exist_ok=True)
    record_sums(root.path, rereads=True)
    return "it was made again"


def _check_store(checked: CheckedRoot, record: StoreRecord) -> list[Finding]:
    """Returns what is wrong with one store."""
    folder = checked.root.store_folder(record.name)
    if (later := find_later(folder, record, checked.db)) is not None:
        return [_describe_later(checked, record, later, folder)]
    if record.packed:
        return _check_packed(checked, record)
    if record.loading:
        reason = "its first content had not come"
        return [Finding(checked.get_name(folder), reason, record.name, is_damage=False, remedy="a server removes it")]
    if not folder.is_dir():
        checked.drop_changed_below(folder)
        remedy = "restore it from a checkpoint, or delete it"
        return [Finding(checked.get_name(folder), "its folder is gone", record.name, remedy=remedy)]
    kind = KINDS[record.kind]
    found = list(_check_kept_record(checked, record, folder))
    try:
        if kind.has_versions:
            return [*found, *check_versions(checked, record)]
        spec = checked.specs.get(record.fingerprint, record.order)
        return [*found, *check_rows(checked, record, kind.make_stored_spec(record, spec))]
    except TDServeError as error:
        remedy = "restore it from a checkpoint"
        return [*found, Finding(checked.get_name(folder), str(error), record.name, remedy=remedy)]


def _describe_later(checked: CheckedRoot, record: StoreRecord, later: LaterRecord, folder: Path) -> Finding:
    """Returns the finding of a folder that the catalog's record does not fit. It is the only one of this store: repairs
    by that record would overwrite its files."""
    checked.drop_changed_below(folder)
    name, own = checked.get_name(folder), later.record
    if own.name != record.name:
        remedy = f"move it to {checked.get_name(folder.with_name(own.name))}, or restore both from a checkpoint"
        reason = f"it is the folder of store {own.name!r}"
        return Finding(name, reason, record.name, remedy=remedy, is_not_served=True)
    reason = "the catalog has another store of this name"
    if own.uid == record.uid:
        reason = f"the catalog has an earlier state of this store; later in its folder: {later.what}"
    repair = partial(run_apart, partial(take_later, checked.root, record, own), path=name)
    return Finding(name, reason, record.name, repair=repair, is_not_served=True)


def _check_kept_record(checked: CheckedRoot, record: StoreRecord, folder: Path) -> Iterator[Finding]:
    try:
        KeptRecord.load(folder)
    except TDServeError as error:
        path = folder / RECORD_FILE
        yield Finding(checked.get_name(path), f"{error}; it is a copy", record.name, repair=partial(remove_file, path))


def _check_packed(checked: CheckedRoot, record: StoreRecord) -> list[Finding]:
    """Returns what is wrong with a store of which all is in the catalog; a damaged record was found there."""
    try:
        is_there = checked.db.get("packed", record.uid.encode()) is not None
    except TDServeError:
        return []
    remedy = "restore it from a checkpoint, or delete it"
    return [] if is_there else [Finding("catalog/data.mdb", "its content is gone", record.name, remedy=remedy)]


def _list_strangers(checked: CheckedRoot, names: set[str]) -> Iterator[Finding]:
    """Yields folders that no store has: of a store whose record is lost, or that a crash has left."""
    root = checked.root
    for folder in root.list_store_folders():
        name = checked.get_name(folder)
        if folder.name.startswith(SET_ASIDE):
            yield Finding(name, set_aside.REASON, remedy=set_aside.describe_remedy(folder), is_not_served=True)
        elif folder.name.startswith("."):
            reason = "files of a store that was deleted"
            yield Finding(name, reason, is_damage=False, repair=partial(remove_file, folder))
        elif folder.name not in names:
            checked.drop_changed_below(folder)
            reason = "the catalog has no store of this name"
            repair = partial(run_apart, partial(take_back, root, folder.name), path=name)
            yield Finding(name, reason, repair=repair, is_not_served=True)
    for folder in (root.path / "checkpoints", root.path / "arriving"):
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            reason = f"a leftover of {'a checkpoint' if folder.name == 'checkpoints' else 'a store that came'}"
            if path.is_dir() and path.name.encode() not in checked.db.list_keys("arriving"):
                yield Finding(checked.get_name(path), reason, is_damage=False, repair=partial(remove_file, path))
    for path in sorted(root.path.rglob(f"*{FRESH_SUFFIX}")):
        if not is_own(path.relative_to(root.path)):
            continue
        # Other folders of such a name are of stores, or of nested keys.
        if path.is_dir() and path.parent.parent != root.path / "stores":
            continue
        yield Finding(checked.get_name(path), "a leftover", is_damage=False, repair=partial(remove_file, path))
