"""``tdserve check PATH``: compares all that a root, or a place of checkpoints, has with its checksums, and repairs what
can be."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.progress import BarColumn, Progress as Bar, TextColumn, TimeElapsedColumn

from tdserve.cli.screen.render import escape_unprintable, format_nbytes, print_json, print_lines
from tdserve.cli.shell.exit_codes import DAMAGED
from tdserve.server.checking.findings import Finding, Progress
from tdserve.server.checking.root_check import RootReport, check_root

if TYPE_CHECKING:
    from tdserve.client.moves.archive_check import ArchiveReport


@click.command()
@click.argument("path")
@click.option("--repair", "repairs", is_flag=True, help="Repair what can be: damaged rows and versions are dropped.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def check(path: str, *, repairs: bool, as_json: bool) -> int:
    """Compare everything in the root PATH with its checksums. No server may have it open.

    PATH may also be a place of checkpoints, or of a cluster's, as a folder or a URL of fsspec. There a repair removes
    damaged blocks, which a later checkpoint writes again if its stores still have that content, and damaged manifests,
    whose checkpoints are lost.
    Exit code 0: all is whole, or is repaired. Exit code 8: it is not, or the folder of a store that is not in service
    lies in the root.
    """
    if "://" in path or _is_place(Path(path)):
        return _check_checkpoints(path, repairs=repairs, as_json=as_json)
    with _show_bar() as show:
        report = check_root(Path(path), repairs=repairs, on_progress=show)
    if as_json:
        print_json(_describe_report(report))
    else:
        _print(report, repairs=repairs)
    return DAMAGED if report.num_damaged else 0


def _is_place(path: Path) -> bool:
    """Returns whether checkpoints lie there, of a server or of those of a cluster."""
    has_checkpoints = Path(path, "checkpoints").is_dir() or any(path.glob("server-*/checkpoints"))
    return has_checkpoints and not Path(path, "tdserve.json").exists()


def _check_checkpoints(place: str, *, repairs: bool, as_json: bool) -> int:
    from tdserve.client.moves.archive_check import check_archive

    with _show_bar() as show:

        def show_blocks(report: ArchiveReport) -> None:
            done, total = report.num_blocks, report.num_all
            show(Progress(num_stores=total, num_checked=done, nbytes=report.nbytes, store="blocks"))

        report = check_archive(place, repairs=repairs, on_progress=show_blocks)
    if as_json:
        print_json(
            {
                "checkpoints": report.num_checkpoints,
                "nbytes": report.nbytes,
                "damaged": list(report.damaged),
                "lost": [asdict(each) for each in report.lost],
            }
        )
    else:
        print_lines(_describe_checkpoints(report, repairs=repairs))
    return DAMAGED if report.damaged else 0


def _describe_checkpoints(report: ArchiveReport, *, repairs: bool) -> Iterator[str]:
    """Yields what is damaged, which checkpoints cannot be restored because of it, and what to do."""
    yield from report.damaged
    size = f"{report.num_blocks} blocks, {format_nbytes(report.nbytes)}"
    state = f"{len(report.damaged)} damaged or missing" if report.damaged else "all are whole"
    yield f"{report.num_checkpoints} checkpoints, {size}: {state}"
    if not report.damaged:
        return
    for each in report.lost:
        why = f"it lacks blocks of {', '.join(each.stores)}" if each.stores else "its manifest is damaged"
        yield f"checkpoint {each.id} cannot be restored: {why}"
    num_whole = report.num_checkpoints - len(report.lost)
    yield f"whole checkpoints beside: {num_whole}" if num_whole else "no checkpoint is whole"
    again = "a later checkpoint writes a block again only if its stores still have that content"
    if report.num_removable and not repairs:
        yield f"--repair removes what is damaged; {again}"
        return
    lacking = [each for each in report.lost if each.stores]
    if lacking:
        yield f"{again}; else restore another one, or its other stores by name, and remove its manifest:"
        yield from (f"  {each.manifest}" for each in lacking)


@contextmanager
def _show_bar() -> Iterator[Callable[[Progress], None]]:
    """A block that shows a bar on stderr, where that is a terminal."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.fields[read]}"))
    console = Console(file=sys.stderr)
    with Bar(*columns, TimeElapsedColumn(), console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("check", total=None, read="")

        def show(progress: Progress) -> None:
            bar.update(
                task,
                total=progress.num_stores,
                completed=progress.num_checked,
                description=escape_unprintable(progress.store)[:40],
                read=format_nbytes(progress.nbytes),
            )

        yield show


def _describe_report(report: RootReport) -> dict[str, object]:
    progress = report.progress
    return {
        "findings": [finding.as_dict() for finding in report.findings],
        "num_damaged": report.num_damaged,
        "num_not_served": report.num_not_served,
        "num_stores": progress.num_stores,
        "nbytes": progress.nbytes,
        "is_orderly": report.is_orderly,
        "num_unsummed_rows": progress.num_unsummed_rows,
        "num_unsummed_versions": progress.num_unsummed_versions,
    }


def _print(report: RootReport, *, repairs: bool) -> None:
    for finding in report.findings:
        kind = "damage" if finding.is_damage else "leftover"
        click.echo(escape_unprintable(f"{'repaired' if finding.repaired else kind}: {finding.describe()}"))
    progress = report.progress
    click.echo(f"{progress.num_stores} stores, {format_nbytes(progress.nbytes)} read")
    if not report.is_orderly:
        click.echo(
            f"the last server did not end in order: {progress.num_unsummed_rows} rows and "
            f"{progress.num_unsummed_versions} versions, written since the last sync, could not be compared"
        )
    for line in _conclude(report, repairs=repairs):
        click.echo(line)


def _conclude(report: RootReport, *, repairs: bool) -> Iterator[str]:
    """Yields the last lines: whether all is whole, and how many stores are not in service."""
    num_left = report.num_not_served
    num_faults = sum(each.is_damage and not each.repaired for each in report.findings) - num_left
    hint = "" if repairs or not any(map(_is_repairable, report.findings)) else "; --repair repairs what can be"
    again = " again" if any(each.repaired for each in report.findings) else ""
    if num_faults:
        yield f"{num_faults} fault{'s' if num_faults > 1 else ''}{'' if num_left else hint}"
    elif report.num_damaged > num_left:
        yield "the rest is whole again; what is named as lost is not"
    else:
        yield f"all {'else ' if num_left else ''}is whole{again}"
    if num_left:
        yield f"{num_left} store{'s are' if num_left > 1 else ' is'} not in service{hint}"


def _is_repairable(finding: Finding) -> bool:
    return finding.repair is not None
