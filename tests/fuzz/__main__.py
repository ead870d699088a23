"""``python -m tests.fuzz --inputs 1000000 --seed 1``: feeds random input to every decoder, and ends with 1 on a fault.

``--only NAME`` takes one decoder. Instead of them, ``--sessions`` takes requests to a real server, ``--roots`` damaged
files of a root, which are checked, and every tenth is served, ``--tls`` damaged certificates. ``--coverage`` is guided
by what of the code each input reaches: it needs ``pip install atheris``, and runs until it is told to end, or finds a
fault.
"""

from __future__ import annotations

import argparse
import sys

from tests.fuzz.campaign import fuzz_decoder
from tests.fuzz.damaged_roots import RootCampaign
from tests.fuzz.decoders import make_decoders
from tests.fuzz.hostile_requests import RequestCampaign
from tests.fuzz.inputs import Inputs
from tests.fuzz.tls_files import TLSCampaign


def main() -> int:
    """Runs what the command line asks for. Returns 1 if there was a fault."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="")
    parser.add_argument("--sessions", action="store_true")
    parser.add_argument("--roots", action="store_true")
    parser.add_argument("--tls", action="store_true")
    parser.add_argument("--coverage", action="store_true")
    arguments, rest = parser.parse_known_args()
    if arguments.sessions:
        return _fuzz_sessions(arguments.inputs, arguments.seed)
    if arguments.roots:
        roots = RootCampaign(arguments.seed)
        roots.check(arguments.inputs)
        roots.serve(arguments.inputs // 10)
        return _describe(roots)
    if arguments.tls:
        certificates = TLSCampaign(arguments.seed)
        certificates.run(arguments.inputs)
        return _describe(certificates)
    decoders = {name: each for name, each in make_decoders().items() if arguments.only in ("", name)}
    if arguments.coverage:
        return _run_atheris(arguments.only, rest)
    num_faults = 0
    for name, decoder in decoders.items():
        tally = fuzz_decoder(decoder, Inputs(arguments.seed), max(arguments.inputs // len(decoders), 1))
        print(f"{name}: {tally.num_inputs:,} inputs, {tally.num_accepted:,} accepted, {len(tally.faults)} faults")
        for where, (content, text) in tally.faults.items():
            print(f"  {where}: {content[:200].hex()} ({len(content)} bytes)\n{text}")
        num_faults += len(tally.faults)
    return int(num_faults > 0)


def _fuzz_sessions(num_requests: int, seed: int) -> int:
    with RequestCampaign(seed) as campaign:
        campaign.run(num_requests)
        print(*campaign.describe(), sep="\n")
        return int(bool(campaign.list_faults()))


def _describe(campaign: RootCampaign | TLSCampaign) -> int:
    for outcome, number in sorted(campaign.outcomes.items()):
        print(f"{outcome}: {number:,}")
    print(*campaign.faults, sep="\n")
    return int(bool(campaign.faults))


def _run_atheris(only: str, rest: list[str]) -> int:
    import atheris

    if not only:
        print("--coverage needs --only NAME:", *make_decoders(), sep="\n  ")
        return 2
    atheris.instrument_all()
    decoder = make_decoders()[only]
    atheris.Setup([sys.argv[0], *rest], decoder.check)
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
