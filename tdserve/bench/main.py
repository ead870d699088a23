"""``tdserve bench``: runs workloads, prints their figures as they come, and tells which targets are reached."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

from tdserve.base.errors import InvalidRequestError, TDServeError
from tdserve.bench.figures import Figure, Scale, to_gigabytes
from tdserve.bench.floor_link import REQUEST_NBYTES
from tdserve.bench.floors import make_fresh_memcpy, make_touched_memcpy
from tdserve.bench.machine import describe_machine
from tdserve.bench.measure import alternate
from tdserve.bench.options import MIB, WORKLOAD_NAMES, BenchOptions
from tdserve.bench.report import show_figures, show_machine, show_summary, write_json
from tdserve.bench.stage import Stage, open_stage
from tdserve.bench.torchrl_buffer import MISSING, has_torchrl
from tdserve.bench.workloads.chat import measure_chat
from tdserve.bench.workloads.dataset import measure_dataset
from tdserve.bench.workloads.mixed import measure_mixed
from tdserve.bench.workloads.replays import measure_pixels, measure_prioritized, measure_transitions
from tdserve.bench.workloads.small import measure_small
from tdserve.bench.workloads.weights import measure_weights

__all__ = ["BenchOptions", "run"]

WORKLOADS: dict[str, Callable[[Stage], Iterator[Figure]]] = {
    "transitions": measure_transitions,
    "pixels": measure_pixels,
    "weights": measure_weights,
    "small": measure_small,
    "prioritized": measure_prioritized,
    "mixed": measure_mixed,
    "chat": measure_chat,
    "dataset": measure_dataset,
}
"""By the names of ``tdserve.bench.options.WORKLOAD_NAMES``."""


def run(options: BenchOptions, console: Console | None = None) -> int:
    """Measures and reports.

    When a workload fails, or reads something else than was written, that is reported and the next workload runs.

    Args:
        options: What to run.
        console: The console to print to; standard output by default.

    Returns:
        The exit status: 0, or 1 when a workload failed. A missed target is no failure.

    Raises:
        InvalidRequestError: There is no such workload, or the rounds are less than 1. Nothing was started.
        TDServeError: The server did not start, or there is no such transport. Nothing is left behind.
    """
    _check(options)
    console = console or Console()
    started = time.monotonic()
    figures: list[Figure] = []
    num_failed = 0
    with _end_on_sigterm(), open_stage(options) as stage:
        machine = {**describe_machine(stage.folder), "transport": stage.wire}
        show_machine(console, machine)
        if stage.wire == "shm" and not has_torchrl():
            console.print(MISSING, style="yellow", markup=False)
        figures += _measure_floors(stage)
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
def _end_on_sigterm() -> Iterator[None]:
    """Lets SIGTERM end the run as Ctrl-C does, so that nothing is left behind then either."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _check(options: BenchOptions) -> None:
    for name in options.workloads:
        if name not in WORKLOADS:
            raise InvalidRequestError(
                argument="workloads", reason=f"each must be one of {', '.join(WORKLOAD_NAMES)}, got {name!r}"
            )
    if options.num_rounds < 1:
        raise InvalidRequestError(argument="repeats", reason=f"{options.num_rounds} is less than 1")


def _measure_floors(stage: Stage) -> Iterator[Figure]:
    """Measures the machine by itself. The workloads measure their own floors again, beside what they judge."""
    nbytes = stage.sizes.memcpy_nbytes
    tasks = {
        "memcpy into touched pages": (Scale("GB/s", to_gigabytes(nbytes)), make_touched_memcpy(nbytes)),
        "memcpy into fresh pages": (Scale("GB/s", to_gigabytes(nbytes)), make_fresh_memcpy(nbytes)),
    }
    for size in (1,) if stage.options.quick else (64, 1):
        stream = (Scale("GB/s", to_gigabytes(size * MIB)), stage.make_gloo_floor(back=size * MIB))
        tasks[f"gloo stream, {size} MiB messages"] = stream
    tasks["gloo round trip"] = (Scale("us"), stage.make_gloo_floor(out=REQUEST_NBYTES, back=REQUEST_NBYTES))
    measured = alternate({name: task for name, (_, task) in tasks.items()}, stage.num_rounds, stage.pacing)
    for name, series in measured.items():
        yield stage.judge("floors", name, tasks[name][0], series)
