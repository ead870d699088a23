"""Frames and updates per second of the example programs, with the buffer in the process and on a server, in turn.

``python -m tdserve.examples.frames_per_second`` runs each program before and after the change, several times, in turn,
each time with a fresh server; it prints medians and their ratios.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import tdserve
from tdserve.base.errors import PeerLostError

PROGRAMS: Mapping[str, str] = {
    "cleanrl_dqn": "--total-timesteps",
    "sb3_dqn": "--total-timesteps",
    "torchrl_dqn": "--total-frames",
}
"""Name of the program that uses a server -> its option for the number of frames."""

_RATES = re.compile(r"^([\d.]+) frames/s, ([\d.]+) updates/s$", re.MULTILINE)


class Rates(NamedTuple):
    """What a program did, per second."""

    frames: float
    updates: float


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(prog="python -m tdserve.examples.frames_per_second")
    parser.add_argument("programs", nargs="*", metavar="PROGRAM", help=f"of {', '.join(PROGRAMS)}; all by default")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="runs of each program")
    parser.add_argument("--frames", type=int, default=5_000, metavar="N", help="of each run")
    args = parser.parse_args(arguments)
    if unknown := {*args.programs} - {*PROGRAMS}:
        parser.error(f"unknown programs: {', '.join(sorted(unknown))}")
    return args


def run_program(name: str, arguments: Sequence[str], address: str = "") -> Rates:
    """Runs a program, and returns the rates that it prints.

    Args:
        name: Its module.
        arguments: Its command line.
        address: Address of the server that it finds in its environment, if any.

    Raises:
        PeerLostError: It ended otherwise.
    """
    command = ["env", f"TDSERVE_ADDRESS={address}", sys.executable, "-m", f"tdserve.examples.{name}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = _RATES.search(done.stdout)
    if done.returncode or found is None:
        raise PeerLostError(peer=name, reason=f"it ended with code {done.returncode}\n{done.stderr[-2000:]}")
    return Rates(*map(float, found.groups()))


def measure(args: argparse.Namespace) -> Iterator[tuple[str, Rates, Rates]]:
    """Yields each program with the medians of its rates, without and with a server."""
    for name in args.programs or PROGRAMS:
        before, after = list[Rates](), list[Rates]()
        arguments = [PROGRAMS[name], str(args.frames)]
        for _ in range(args.rounds):
            before.append(run_program(f"{name}_before", arguments))
            with tempfile.TemporaryDirectory(prefix="tdserve-") as root, tdserve.Server(root, port=0).start() as server:
                after.append(run_program(name, arguments, server.address))
        yield name, _find_medians(before), _find_medians(after)


def _find_medians(rates: Sequence[Rates]) -> Rates:
    return Rates(*map(statistics.median, zip(*rates, strict=True)))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, and prints a table."""
    print("| program | frames/s in the process | with tdserve | updates/s in the process | with tdserve | ratio |")
    print("|---|---|---|---|---|---|")
    for name, before, after in measure(parse_args(arguments)):
        rates = f"{before.frames:.0f} | {after.frames:.0f} | {before.updates:.0f} | {after.updates:.0f}"
        print(f"| {name} | {rates} | {after.frames / before.frames:.2f} |", flush=True)


if __name__ == "__main__":
    main()
