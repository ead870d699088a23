"""``tdserve soak``: all kinds of clients under kills for as long as you like, checked and measured."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tdserve.base.config import TransportName, check_transport
from tdserve.cli.screen.render import format_nbytes, print_json, print_table
from tdserve.cli.shell.exit_codes import DAMAGED, FAILED
from tdserve.cli.shell.number_types import TimeRange

if TYPE_CHECKING:
    from tdserve.soak.verdicts import Line

COUNTS = ("descriptors", "threads", "files")
"""Figures that are no bytes."""


def _read_transports(context: click.Context, parameter: click.Parameter, value: str) -> tuple[TransportName, ...]:
    return tuple(check_transport(name) for name in value.split(","))


@click.command(context_settings={"show_default": True})
@click.option("--minutes", type=TimeRange(min=0.0, min_open=True), default=10.0, help="How long.")
@click.option(
    "--transports",
    callback=_read_transports,
    default="gloo,shm,grpc",
    help="Of the clients: for each, one that stays and one that comes and goes.",
)
@click.option(
    "--kill-every",
    "kill_every_s",
    type=TimeRange(min=0.0),
    default=15.0,
    metavar="SECONDS",
    help="Mean time between two kills, less in a short run; 0: none.",
)
@click.option("--workers", "num_workers", type=click.IntRange(min=1), default=2, help="Data workers of the server.")
@click.option("--seed", type=int, default=1, help="Decides what is killed in which order.")
@click.option("--root", type=click.Path(path_type=Path), help="The server's root, kept; by default a temporary one.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document at the end; progress is on stderr.")
def soak(*, as_json: bool, **settings: Any) -> int:
    """Run writers, samplers, publishers, queues and keyed stores on a server of its own, and kill processes.

    In rounds of at most 90 s: after each, all content is compared with what the clients were told, the stores are
    deleted, and memory, descriptors, threads, disk and shared memory are measured. In the first half of the time every
    kind of process is killed, each at least once however short the time is, in the second half clients alone.

    Exits with 8 if content was lost, doubled or torn, or a client failed; with 1 if a figure grows; else with 0.
    """
    from tdserve.soak.rounds import Soak, SoakOptions
    from tdserve.soak.verdicts import find_verdict, judge_figures, make_document  # imports torch

    result = Soak(SoakOptions(**settings), lambda line: click.echo(line, err=True)).run()
    lines = judge_figures(result)
    document = make_document(result, lines)
    if as_json:
        print_json(document)
    else:
        _show(document, lines)
    return {"damaged": DAMAGED, "grows": FAILED}.get(find_verdict(result, lines), 0)


def _show(document: dict[str, Any], lines: list[Line]) -> None:
    def show(value: float, figure: str, *, sign: str = "") -> str:
        if not math.isfinite(value):
            return "?"
        if figure in COUNTS:
            return f"{value:{sign}.1f}"
        return ("-" if value < 0 else sign) + format_nbytes(round(abs(value)))

    print_table(
        ("killed", "of", "figure", "level", "per hour", "from", "to", "verdict"),
        [
            (
                line.kills,
                line.role,
                line.figure,
                show(line.slope.level, line.figure),
                *(show(each, line.figure, sign="+") for each in (line.slope.per_hour, line.slope.low, line.slope.high)),
                line.verdict,
            )
            for line in lines
        ],
        right=("level", "per hour", "from", "to"),
    )
    kills = ", ".join(f"{n} {k}" for k, n in document["kills"].items())
    click.echo(f"{document['rounds']} rounds; kills: {kills or 'none'}")
    for name, count in document["counts"].items():
        click.echo(f"{name}: {count:,}")
    click.echo(f"latest end of a call after its deadline: {document['latest_call_s']:.2f} s")
    if document["back_s"]:
        back = document["back_s"]
        click.echo(f"answers after a restart: median {back['median']:.2f} s, at worst {back['max']:.2f} s")
    for fault in document["faults"][:20]:
        click.echo(f"fault: {fault}")
    click.echo(document["verdict"] + ("" if kills else "; nothing was killed"))
