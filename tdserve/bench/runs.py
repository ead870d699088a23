"""``tdserve bench``: runs workloads, prints their figures as they come, and which targets are reached."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from rich.console import Console

from tdserve.base.errors import InvalidRequestError, TDServeError
from tdserve.bench.bench_options import FLOORS, MIB, WORKLOAD_NAMES, BenchOptions
from tdserve.bench.comparison import SavedRun, read_run
from tdserve.bench.comparison_report import show_comparison
from tdserve.bench.cost_report import show_costs
from tdserve.bench.figures import Figure, Scale, to_gigabytes
from tdserve.bench.floor_link import REQUEST_NBYTES
from tdserve.bench.floors import make_fresh_memcpy, make_memcpy
from tdserve.bench.machine_facts import describe_machine
from tdserve.bench.occupancy_report import show_occupancy
from tdserve.bench.picture import check_can_draw, draw_figures
from tdserve.bench.report import show_figures, show_machine, show_summary, write_json
from tdserve.bench.stage import Case, Stage, open_stage
from tdserve.bench.torchrl_buffer import MISSING, has_torchrl
from tdserve.bench.workloads.chat import measure_chat
from tdserve.bench.workloads.compared_rows import measure_checksums
from tdserve.bench.workloads.data_loader import measure_dataset
from tdserve.bench.workloads.keyed import measure_keyed
from tdserve.bench.workloads.many_clients import measure_cluster, measure_many_clients
from tdserve.bench.workloads.many_stores import measure_many_stores
from tdserve.bench.workloads.mixed import measure_mixed
from tdserve.bench.workloads.replays import measure_pixels, measure_prioritized, measure_transitions
from tdserve.bench.workloads.small import measure_small
from tdserve.bench.workloads.weight_trees import measure_weights

ROUND_TRIP = "gloo round trip"


def run(options: BenchOptions, console: Console | None = None) -> int:
    """Measures and reports.

    When a workload fails, or reads something else than was written, that is reported and the next workload runs.

    Args:
        options: What to run.
        console: The console to print to; standard output by default.

    Returns:
        The exit status: 0, or 1 when a workload failed. A missed target is no failure.

    Raises:
        InvalidRequestError: There is no such workload, the rounds are less than 1, the run to compare with cannot be
            read or had other sizes, or a file cannot be written where its folder is missing. Nothing was started.
        NotSupportedError: A picture is asked for and matplotlib is not installed. Nothing was started.
        TDServeError: The server did not start, or there is no such transport. Nothing is left behind.
    """
    _check(options)
    saved = None if options.compare_path is None else _read_like_run(options.compare_path, options)
    console = console or Console(highlight=False)
    started = time.monotonic()
    figures: list[Figure] = []
    num_failed = 0
    with _end_on_sigterm(), open_stage(options) as stage:
        machine = {**describe_machine(stage.folder), "transport": stage.transport}
        show_machine(console, machine)
        if stage.transport == "shm" and not has_torchrl():
            console.print(MISSING, style="yellow", markup=False)
        for name in (FLOORS, *options.workloads):
            found: list[Figure] = []
            try:
                for figure in measure(stage, name):
                    found.append(figure)
            except TDServeError as error:
                num_failed += 1
                console.print(f"{name} failed: {type(error).__name__}: {error}", style="bold red", markup=False)
            show_figures(console, found, title=name, is_judged=not options.quick)
            show_costs(console, found)
            show_occupancy(console, found)
            figures += found
    seconds = time.monotonic() - started
    show_summary(console, figures, is_judged=not options.quick, seconds=seconds)
    if saved is not None:
        show_comparison(console, saved, figures, machine=machine)
    if options.json_path is not None:
        write_json(options.json_path, machine=machine, options=options, figures=figures, seconds=seconds)
    if options.plot_path is not None:
        title = f"tdserve bench over {machine['transport']}, {machine['processor']}, {machine['cores']} cores"
        draw_figures(options.plot_path, figures, title=title, saved=saved)
    return 1 if num_failed else 0


@contextmanager
def _end_on_sigterm() -> Iterator[None]:
    """Lets SIGTERM end the run as Ctrl-C does, so that nothing is left behind then either."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _check(options: BenchOptions) -> None:
    for name in options.workloads:
        if name not in WORKLOAD_NAMES:
            reason = f"each must be one of {', '.join(WORKLOAD_NAMES)}, got {name!r}"
            raise InvalidRequestError(argument="workloads", reason=reason)
    if options.num_rounds < 1:
        raise InvalidRequestError(argument="repeats", reason=f"{options.num_rounds} is less than 1")
    for argument, path in (("--json", options.json_path), ("--plot", options.plot_path)):
        if path is not None and not path.absolute().parent.is_dir():
            raise InvalidRequestError(argument=argument, reason=f"there is no folder {path.absolute().parent}")
    if options.plot_path is not None:
        check_can_draw()


def _read_like_run(path: Path, options: BenchOptions) -> SavedRun:
    """Reads a saved run with the same sizes."""
    saved = read_run(path)
    if saved.is_quick != options.quick:
        remedy = "add --quick" if saved.is_quick else "leave out --quick, or save such a run"
        raise InvalidRequestError(argument="--compare", reason=f"the run in {path} had other sizes: {remedy}")
    return saved


def measure(stage: Stage, workload: str) -> Iterator[Figure]:
    """Runs a workload, and yields its figures as they come."""
    with closing(WORKLOADS[workload](stage)) as cases:
        for case in cases:
            yield stage.measure(workload, case)


def _measure_floors(stage: Stage) -> Generator[Case]:
    """Measures the machine by itself. The workloads measure their own floors again, beside what they judge."""
    nbytes, link = stage.sizes.memcpy_nbytes, stage.link
    copied = Scale("GB/s", to_gigabytes(nbytes))
    yield Case("memcpy into touched pages", copied, make_memcpy(nbytes), counts_cpu=False)
    yield Case("memcpy into fresh pages", copied, make_fresh_memcpy(nbytes), counts_cpu=False)
    for size in (1,) if stage.options.quick else (64, 1):
        scale, stream = Scale("GB/s", to_gigabytes(size * MIB)), link.make_floor(back=size * MIB)
        yield Case(f"gloo stream, {size} MiB messages", scale, stream, counts_cpu=False)
    round_trip = link.make_floor(out=REQUEST_NBYTES, back=REQUEST_NBYTES)
    yield Case(ROUND_TRIP, Scale("us"), round_trip, counts_cpu=False)


WORKLOADS: dict[str, Callable[[Stage], Generator[Case]]] = {
    FLOORS: _measure_floors,
    "transitions": measure_transitions,
    "pixels": measure_pixels,
    "weights": measure_weights,
    "small": measure_small,
    "prioritized": measure_prioritized,
    "checksums": measure_checksums,
    "mixed": measure_mixed,
    "chat": measure_chat,
    "dataset": measure_dataset,
    "kv": measure_keyed,
    "creation": measure_many_stores,
    "clients": measure_many_clients,
    "cluster": measure_cluster,
}
"""The workloads by their names in ``tdserve.bench.bench_options.WORKLOAD_NAMES``."""
