"""A process that has a store's live leaves, and does what it is told line by line on its input.

``read KEY`` prints the value, ``write KEY VALUE`` updates the leaf in place and prints ``written``, ``end`` ends it.
Values are JSON.
"""

from __future__ import annotations

import json
import sys

from tensordict import NonTensorData

import tdserve


def main() -> None:
    """``live_peer.py ADDRESS STORE``; says ``ready`` first."""
    address, name = sys.argv[1:]
    with tdserve.connect(address, timeout_s=20.0) as client:
        td = client.load_memmap(name)
        say("ready")
        for line in sys.stdin:
            word, *rest = line.split(maxsplit=2)
            if word == "end":
                return
            if word == "read":
                say(td[rest[0].strip()])
            else:
                td.get(rest[0]).update(NonTensorData(json.loads(rest[1])), inplace=True)
                say("written")


def say(value: object) -> None:
    """Prints one line of JSON."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
