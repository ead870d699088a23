"""``tdserve bench``: measures tdserve beside the floors of the same machine in the same minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Console

from tdserve.base.config import TRANSPORTS, check_transport
from tdserve.bench.bench_options import PEERS, SIMULATE, USUAL_WORKLOADS, WORKLOAD_NAMES, BenchOptions

FILE = click.Path(path_type=Path, dir_okay=False)


def _read_numbers(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...]:
    if value is None:
        return ()
    numbers = value.split(",")
    if not all(number.isdecimal() and int(number) for number in numbers):
        raise click.BadParameter(f"{value!r} is not a list of numbers such as 1,2,4", context, parameter)
    return tuple(map(int, numbers))


def _read_range(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, int] | None:
    if value is None:
        return None
    first, dots, last = value.rpartition("..")
    first = first if dots else "1"
    if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        raise click.BadParameter(f"{value!r} is neither a number nor a range such as 1..64", context, parameter)
    return int(first), int(last)


@click.command()
@click.argument("workloads", nargs=-1, type=click.Choice((*WORKLOAD_NAMES, SIMULATE, PEERS)))
@click.option(
    "--transport",
    type=click.Choice(TRANSPORTS),
    default="gloo",
    show_default=True,
    help="How content travels; floors and targets are those of gloo or of shm.",
)
@click.option("--repeats", type=click.IntRange(min=1), help="Rounds of every floor and subject.")
@click.option(
    "--clients", callback=_read_range, help="Processes for `clients`, `cluster`, such as 1..8; for `simulate` 10000."
)
@click.option("--shards", callback=_read_numbers, help="Servers for `cluster`: 1,2,4; of a table for `simulate`: 8.")
@click.option("--servers", type=click.IntRange(min=1), default=1000, show_default=True, help="For `simulate`.")
@click.option("--stores", type=click.IntRange(min=1), help="For `simulate`; by default one for ten clients.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="For `simulate`.")
@click.option("--quick", is_flag=True, help="Small sizes, to see that everything works.")
@click.option("--json", "json_path", type=FILE, help="File for the figures.")
@click.option("--compare", "compare_path", type=FILE, help="File of an earlier --json, to compare with.")
@click.option("--plot", "plot_path", type=FILE, metavar="PNG", help="File for a picture; needs matplotlib.")
@click.option("--root", "parent", type=click.Path(path_type=Path), help="Folder for the data of the run.")
def bench(
    workloads: tuple[str, ...],
    *,
    transport: str,
    clients: tuple[int, int] | None,
    shards: tuple[int, ...],
    servers: int,
    stores: int | None,
    seed: int,
    json_path: Path | None,
    **settings: Any,
) -> int:
    """Measure WORKLOADS (by default all but cluster) and their ratios to the floor.

    simulate measures nothing, and runs alone: it runs the rules of servers and clients on a clock that does not wait.
    peers runs alone, too: it measures tdserve beside TorchRL, Redis and Ray, as far as they are installed.
    """
    if workloads == (SIMULATE,):
        if settings["compare_path"] or settings["plot_path"]:
            raise click.UsageError(f"{SIMULATE} measures nothing: neither --compare nor --plot goes with it")
        from tdserve.bench.simulation import make_scenario, run_simulation

        scenarios = [make_scenario(servers, (clients or (1, 10_000))[1], stores, num, seed) for num in shards or (8,)]
        return run_simulation(scenarios, json_path=json_path)
    if workloads == (PEERS,):
        from tdserve.bench.peers.peers_run import run_peers

        if json_path or settings["compare_path"] or settings["plot_path"]:
            raise click.UsageError(f"{PEERS} prints a table: neither --json nor --compare nor --plot goes with it")
        return run_peers(
            Console(highlight=False),
            num_rounds=settings["repeats"],
            is_quick=settings["quick"],
            parent=settings["parent"],
        )
    if alone := {SIMULATE, PEERS}.intersection(workloads):
        raise click.UsageError(f"run {' and '.join(sorted(alone))} alone")
    from tdserve.bench.runs import run  # imports torch

    settings |= {"clients": clients or BenchOptions.clients, "shards": shards or BenchOptions.shards}
    options = BenchOptions(workloads or USUAL_WORKLOADS, check_transport(transport), json_path=json_path, **settings)
    return run(options)
