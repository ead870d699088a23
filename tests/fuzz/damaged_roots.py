"""Random damage of the files of a root: ``tdserve check`` finds it, and no server crashes of it or serves it unnoticed.

The root is the one of ``tests/stored_root``, whose server has ended in order.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

import tdserve
from tdserve.base.errors import LocalProtocolError, TDServeError
from tdserve.server.checking.root_check import check_root
from tdserve.server.start_lines import READY_PREFIX
from tests.fuzz.inputs import Inputs
from tests.processes import REPOSITORY
from tests.roots import make_quick_root
from tests.sameness import difference
from tests.stored_root import stored
from tests.stored_root.unpacking import unpack_root

PAGE_NBYTES = 4096
"""Databases and files of rows are mostly zeros: damage goes to places with content."""

MAX_CHECK_S = 60
"""After which a check counts as one that never ends, seconds."""

TIMEOUT_S = 20.0


class Damage(NamedTuple):
    """What was done to a root.

    Attributes:
        path: The file, relative to the root.
        kind: What was done to it.
    """

    path: str
    kind: str


def spoil(root: Path, inputs: Inputs) -> Damage:
    """Damages one random file of a root in a random way."""
    rng = inputs.rng
    files = sorted(path for path in root.rglob("*") if path.is_file())
    path = rng.choice(files)
    content = path.read_bytes()
    kind = rng.choice(("bytes", "bytes", "bytes", "cut", "empty", "noise", "other", "gone", "more"))
    if kind == "bytes":
        pages = [at for at in range(0, len(content), PAGE_NBYTES) if any(content[at : at + PAGE_NBYTES])] or [0]
        at = rng.choice(pages)
        page = content[at : at + PAGE_NBYTES]
        content = content[:at] + inputs.mutate(page)[: len(page)].ljust(len(page), b"\0") + content[at + PAGE_NBYTES :]
    elif kind == "cut":
        content = content[: rng.randrange(len(content) or 1)]
    elif kind == "empty":
        content = b""
    elif kind == "noise":
        content = rng.randbytes(len(content) or 8)
    elif kind == "other":
        content = rng.choice(files).read_bytes()
    elif kind == "more":
        content += rng.randbytes(rng.choice((1, 8, PAGE_NBYTES)))
    if kind == "gone":
        path.unlink()
    else:
        path.write_bytes(content)
    return Damage(str(path.relative_to(root)), kind)


def check_apart(root: Path, *, repairs: bool = False) -> str:
    """Checks a root in a process of its own, whose death by a signal is a result too.

    Returns:
        ``whole``, ``damaged``, ``refused: ...`` or ``fault: ...``.
    """
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if not pid:
        signal.alarm(MAX_CHECK_S)
        try:
            report = check_root(root, repairs=repairs)
            text = "damaged" if any(each.is_damage and not each.repaired for each in report.findings) else "whole"
        except LocalProtocolError:
            text = f"fault: {traceback.format_exc()}"
        except TDServeError as error:
            text = f"refused: {error}"
        except BaseException:  # noqa: BLE001 (it is what this looks for)
            text = f"fault: {traceback.format_exc()}"
        os.write(write_fd, text.encode())
        os._exit(0)
    os.close(write_fd)
    with open(read_fd, "rb") as file:
        text = file.read().decode()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return text or f"fault: its process ended with {code}"


def _is_row(found: Any, first: int, last: int) -> bool:
    expected = stored.rows(first, last)
    texts = list(found["t"]) == [f"text {number}" for number in range(first, last)]
    return texts and torch.equal(found["x"], expected["x"]) and torch.equal(found["n", "i"], expected["n", "i"])


def _read_table(client: tdserve.Client) -> bool:
    found = client.replay("replay", timeout_s=TIMEOUT_S)[:]
    return _is_row(found[found["n", "i"].argsort()], stored.NUM_INSERTED - stored.CAPACITY, stored.NUM_INSERTED)


def _read_queue(client: tdserve.Client) -> bool:
    queue = client.queue("queue", timeout_s=1.0)
    with queue.take(3) as rows:
        return _is_row(rows, 1, 4)


def _read_weights(client: tdserve.Client) -> bool:
    newest = client.latest("policy")
    return newest is not None and difference(stored.weights(newest.version), newest.data) is None


READS: dict[str, Callable[[tdserve.Client], bool]] = {
    "tensordict": lambda client: difference(stored.tensordict(16.0), client.load_memmap("tensordict")) is None,
    "small": lambda client: difference(stored.small(), client.load_memmap("small")) is None,
    "entries": lambda client: difference(stored.row(2), client.kv("entries")["second"]) is None,
    "policy": _read_weights,
    "replay": _read_table,
    "queue": _read_queue,
}
"""Whether a store has the content that it was given, by name."""

CHECKED_ALWAYS = ("small", "entries")
"""Stores whose content is compared with checksums at each read; the tensors of others ``tdserve check`` compares."""


class RootCampaign:
    """Damages copies of the stored root, one after the other.

    Args:
        seed: Decides what is damaged.

    Attributes:
        faults: What must not happen, with the damage that led to it.
        outcomes: How often what else has happened.
    """

    def __init__(self, seed: int) -> None:
        self.inputs = Inputs(seed)
        self.faults: list[str] = []
        self.outcomes: Counter[str] = Counter()

    def check(self, num_inputs: int) -> None:
        """Has damaged roots checked, and repaired."""
        for _, root, damage in self._spoil_roots(num_inputs):
            for repairs in (False, True):
                found = check_apart(root, repairs=repairs)
                self._note(damage, f"check{' with repairs' if repairs else ''}", found)

    def serve(self, num_inputs: int) -> None:
        """Has damaged roots served, and reads all stores of them."""
        for folder, root, damage in self._spoil_roots(num_inputs):
            verdict = check_apart(_copy(root, folder / "checked"))
            with (folder / "log").open("w") as log:
                self._serve(root, damage, verdict, log)
            text = (folder / "log").read_text()
            if "Traceback" in text or re.search(r"killed by|died", text):
                self.faults.append(f"{damage}: {text}")

    def _spoil_roots(self, num_inputs: int) -> Iterator[tuple[Path, Path, Damage]]:
        """Yields so many damaged roots: a folder for whatever is made beside one, it, and what was done to it."""
        with make_quick_root() as folder:
            whole = unpack_root(folder / "whole")
            for _ in range(num_inputs):
                root = _copy(whole, folder / "root")
                yield folder, root, spoil(root, self.inputs)

    def _serve(self, root: Path, damage: Damage, verdict: str, log: Any) -> None:
        command = [sys.executable, "-m", "tdserve", "serve", str(root), "--port", "0"]
        with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=log, text=True) as process:
            assert process.stdout is not None
            address = process.stdout.readline().removeprefix(READY_PREFIX).strip()
            if not address:
                self._note(damage, "start", f"refused with {process.wait()}")
                return
            try:
                with tdserve.connect(address, transport="gloo", timeout_s=TIMEOUT_S) as client:
                    for name, read in READS.items():
                        self._note_read(damage, name, verdict, lambda read=read: read(client))  # type: ignore[misc]
                    restarts = sum(each["num_restarts"] for each in client.stats()["workers"])
                    self._note(damage, "restarts", f"fault: {restarts}" if restarts > 1 else "none")
            except TDServeError as error:
                self.faults.append(f"{damage}: {type(error).__name__}: {error}")
            process.send_signal(signal.SIGTERM)
            code = process.wait(timeout=TIMEOUT_S)
            self._note(damage, "end", f"fault: it ended with {code}" if code < 0 else f"code {code}")

    def _note_read(self, damage: Damage, name: str, verdict: str, read: Callable[[], bool]) -> None:
        try:
            is_right = read()
        except (LocalProtocolError, tdserve.PeerLostError) as error:
            self._note(damage, f"read of {name}", f"fault: {type(error).__name__}: {error}")
        except TDServeError as error:
            self._note(damage, f"read of {name}", type(error).__name__)
        except Exception:  # noqa: BLE001 (it is what this looks for)
            self._note(damage, f"read of {name}", f"fault: {traceback.format_exc()}")
        else:
            may_be_wrong = verdict != "whole" and name not in CHECKED_ALWAYS
            wrong = "wrong" if may_be_wrong else f"fault: wrong, and the check finds: {verdict}"
            self._note(damage, f"read of {name}", "right" if is_right else wrong)

    def _note(self, damage: Damage, what: str, found: str) -> None:
        if found.startswith("fault"):
            self.faults.append(f"{damage}: {what}: {found}")
        self.outcomes[f"{what}: {found.partition(':')[0]}"] += 1


def _copy(source: Path, target: Path) -> Path:
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    return target
