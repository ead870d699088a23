"""``tdserve bench``: runs workloads, prints their figures as they come, and says which targets are reached."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from tdserve.base.errors import InvalidRequestError, TDServeError
from tdserve.bench.figures import Figure, Scale, gigabytes, make_figure
from tdserve.bench.floor_link import REQUEST_NBYTES
from tdserve.bench.floors import memcpy_fresh, memcpy_touched
from tdserve.bench.machine import describe_machine
from tdserve.bench.measure import alternate
from tdserve.bench.options import MIB, WORKLOAD_NAMES, BenchOptions
from tdserve.bench.report import show_figures, show_machine, show_summary, write_json
from tdserve.bench.stage import Stage, open_stage
from tdserve.bench.torchrl_buffer import MISSING, has_torchrl
from tdserve.bench.workloads import WORKLOADS

__all__ = ["BenchOptions", "run"]


def run(options: BenchOptions, console: Console | None = None) -> int:
    """Measures and reports.

    A workload that fails, also because it read something else than was written, is reported and the next one runs.

    Args:
        options: What to run.
        console: Where to print; standard output by default.

    Returns:
        The exit status: 0, or 1 when a workload failed. Missed targets are figures, not failures.

    Raises:
        InvalidRequestError: An unknown workload, or no rounds. Nothing was started.
        TDServeError: The server did not start, or there is no such transport. Nothing is left behind.
    """
    _check(options)
    console = console or Console()
    started = time.monotonic()
    figures: list[Figure] = []
    num_failed = 0
    with _terminable(), open_stage(options) as stage:
        machine = {**describe_machine(stage.folder), "transport": stage.wire}
        show_machine(console, machine)
        if stage.wire == "shm" and not has_torchrl():
            console.print(MISSING, style="yellow", markup=False)
        figures += _floors(stage)
        show_figures(console, figures, title="floors", is_judged=False)
        for name in options.workloads:
            found: list[Figure] = []
            try:
                for figure in WORKLOADS[name](stage):
                    found.append(figure)
            except TDServeError as error:
                num_failed += 1
                console.print(f"{name} failed: {type(error).__name__}: {error}", style="bold red", markup=False)
            show_figures(console, found, title=name, is_judged=not options.quick)
            figures += found
    seconds = time.monotonic() - started
    show_summary(console, figures, is_judged=not options.quick, seconds=seconds)
    if options.json_path is not None:
        write_json(options.json_path, machine=machine, options=options, figures=figures, seconds=seconds)
    return 1 if num_failed else 0


@contextmanager
def _terminable() -> Iterator[None]:
    """Lets SIGTERM end the run as Ctrl-C does, so that nothing is left behind then either."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _check(options: BenchOptions) -> None:
    for name in options.workloads:
        if name not in WORKLOADS:
            raise InvalidRequestError(argument="workloads", reason=f"{name!r} is none of {', '.join(WORKLOAD_NAMES)}")
    if options.num_rounds < 1:
        raise InvalidRequestError(argument="repeats", reason=f"{options.num_rounds} is less than 1")


def _floors(stage: Stage) -> Iterator[Figure]:
    """What the machine does by itself; the workloads measure their own floors again, beside what they judge."""
    nbytes = stage.sizes.memcpy_nbytes
    sizes = {"gloo stream, 64 MiB messages": 64 * MIB, "gloo stream, 1 MiB messages": MIB}
    if stage.options.quick:
        sizes = {"gloo stream, 1 MiB messages": MIB}
    tasks = {
        "memcpy into touched pages": memcpy_touched(nbytes, stage.pacing),
        "memcpy into fresh pages": memcpy_fresh(nbytes, stage.pacing),
        **{name: stage.gloo.stream_in(size) for name, size in sizes.items()},
        "gloo round trip": stage.gloo.fetch(REQUEST_NBYTES),
    }
    amounts = {**dict.fromkeys(tasks, nbytes), **sizes}
    for name, series in alternate(tasks, stage.num_rounds).items():
        scale = Scale("us") if name == "gloo round trip" else Scale("GB/s", gigabytes(amounts[name]))
        yield make_figure("floors", name, scale, subject=series, floors={})
