"""The process that syncs stores to the disk: ``python -m tdserve.server.durability.sync_process``, started by the
control process.

It reads one order per line, as JSON, from its standard input, and answers each with a line. Syncing takes processor,
disk and interpreter lock for as long as there is much to write, so it has a process of its own, with low priority. The
process ends when its input ends.

``server/README.md`` has a reading order of syncs.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import IO, Any, cast

from tdserve.base.errors import LocalProtocolError, PeerLostError, TDServeError
from tdserve.base.machine import die_with_parent
from tdserve.server.catalog.kept_records import keep_records
from tdserve.store.database.environments import check_pages_when_opened
from tdserve.store.durability.sync_pass import Pass, SyncedWeights
from tdserve.store.durability.watermark import SyncedStore

_CHECKS_PAGES = "--checks-pages"

NICENESS = 10
"""Niceness of the process: whatever serves requests goes first."""


class SyncProcess:
    """The control process's handle of the process. Threads: one at a time.

    Args:
        root_fd: Descriptor of the root's lock, which the process inherits: no other server may use the root while it
            writes.
        checks_pages: Whether it follows the pages of environments first: a damaged one may have ended the last process.
    """

    def __init__(self, root_fd: int, *, checks_pages: bool = False) -> None:
        # Blocks for a few milliseconds (vfork), like the start of data workers.
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tdserve.server.durability.sync_process",
                *([_CHECKS_PAGES] if checks_pages else []),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[root_fd],
        )
        self._sent: dict[str, int] = {}

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def run(self, wanted: Pass, *, gone: Sequence[str] = ()) -> dict[str, str]:
        """Runs ``Pass.run`` in the process; blocks.

        Args:
            gone: Uids of stores that the process need not remember after the pass.

        Raises:
            LocalProtocolError: The pass failed.
            PeerLostError: The process is gone.
        """
        new_stores = [store for store in wanted.stores if self._sent.get(store.uid) != store.structure]
        order = {
            "catalog": wanted.catalog,
            "target": wanted.target,
            "new_stores": [asdict(store) for store in new_stores],
            "stores": [store.uid for store in wanted.stores],
            "weights": [asdict(weights) for weights in wanted.weights],
            "is_all": wanted.is_all,
            "gone": [*gone],
        }
        stdin, stdout = cast(IO[bytes], self._process.stdin), cast(IO[bytes], self._process.stdout)
        try:
            stdin.write(json.dumps(order).encode() + b"\n")
            stdin.flush()
            answer = json.loads(stdout.readline())
        except (OSError, ValueError) as fault:
            raise PeerLostError(peer="the process that syncs", reason="it died and is started again") from fault
        self._sent.update((store.uid, store.structure) for store in new_stores)
        for uid in gone:
            self._sent.pop(uid, None)
        if "error" in answer:
            raise LocalProtocolError(reason=answer["error"])
        failures: dict[str, str] = answer["failures"]
        return failures

    def end(self) -> int:
        """Kills the process, even in the middle of a pass: a pass may end anywhere. Returns its exit code."""
        self._process.kill()
        exit_code = self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
        return exit_code


class Syncer:
    """The executor of orders; it remembers stores that were described once, until they are gone."""

    def __init__(self) -> None:
        self._stores: dict[str, SyncedStore] = {}

    def perform(self, order: dict[str, Any]) -> dict[str, Any]:
        """Carries out an order; returns the answer."""
        for fields in order["new_stores"]:
            self._stores[fields["uid"]] = SyncedStore.from_json(fields)
        weights = [
            SyncedWeights(
                fields["uid"], fields["folder"], {int(key): record for key, record in fields["records"].items()}
            )
            for fields in order["weights"]
        ]
        stores = [self._stores[uid] for uid in order["stores"]]
        work = Pass(order["catalog"], order["target"], stores, weights, is_all=order["is_all"])
        try:
            failures = work.run()
            keep_records(work)
            return {"failures": failures}
        except TDServeError as error:
            return {"error": str(error)}
        finally:
            for uid in order["gone"]:
                self._stores.pop(uid, None)


def main() -> None:
    """Runs the process until its input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    die_with_parent()
    os.nice(NICENESS)
    if _CHECKS_PAGES in sys.argv:
        check_pages_when_opened()
    syncer = Syncer()
    for line in sys.stdin.buffer:
        answer = syncer.perform(json.loads(line))
        try:
            sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
            sys.stdout.buffer.flush()
        except BrokenPipeError:
            os._exit(0)  # the control process is gone; an orderly exit would write again


if __name__ == "__main__":
    main()
