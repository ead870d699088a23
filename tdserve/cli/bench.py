"""``tdserve bench``: measures tdserve beside the floors of the same machine in the same minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from tdserve.base.config import TRANSPORTS, check_transport
from tdserve.bench.bench_options import USUAL_WORKLOADS, WORKLOAD_NAMES, BenchOptions


def _read_numbers(context: click.Context, parameter: click.Parameter, value: str) -> tuple[int, ...]:
    numbers = value.split(",")
    if not all(number.isdecimal() and int(number) for number in numbers):
        raise click.BadParameter(f"{value!r} is not a list of numbers such as 1,2,4", context, parameter)
    return tuple(map(int, numbers))


@click.command()
@click.argument("workloads", nargs=-1, type=click.Choice(WORKLOAD_NAMES))
@click.option(
    "--transport",
    type=click.Choice(TRANSPORTS),
    default="gloo",
    show_default=True,
    help="How content travels; floors and targets are those of gloo or of shm.",
)
@click.option("--repeats", type=click.IntRange(min=1), help="Rounds of every floor and subject.")
@click.option(
    "--clients", "num_clients", type=click.IntRange(min=1), help="Most processes for `clients`, `cluster`: 8."
)
@click.option("--shards", callback=_read_numbers, help="Servers for `cluster`.", default="1,2,4", show_default=True)
@click.option("--quick", is_flag=True, help="Small sizes, to see that everything works.")
@click.option("--json", "json_path", type=click.Path(path_type=Path, dir_okay=False), help="File for the figures.")
@click.option("--root", "parent", type=click.Path(path_type=Path), help="Folder for the data of the run.")
def bench(workloads: tuple[str, ...], *, transport: str, **settings: Any) -> int:
    """Measure WORKLOADS (by default all but cluster) and their ratios to the floor."""
    from tdserve.bench.runs import run  # imports torch

    return run(BenchOptions(workloads or USUAL_WORKLOADS, check_transport(transport), **settings))
