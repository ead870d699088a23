"""Writes ``root.tar.gz`` beside this file: a root folder as this tdserve writes it.

It is run when ``FORMAT_VERSION`` moves, and only then: ``python -m tests.stored_root.make``. Whatever else changes has
to read what lies there.
"""

from __future__ import annotations

import gzip
import io
import tarfile
import tempfile
from pathlib import Path

import torch
from tensordict import TensorDict

import tdserve
from tests.stored_root import stored

TARGET = Path(__file__).with_name("root.tar.gz")

LEFT_OUT = ("tdserve.lock", "lock.mdb", "nonce", "control.sock")
"""What every start makes anew."""


def fill(client: tdserve.Client) -> None:
    """Makes a store of each kind."""
    client.init_remote(stored.tensordict(), "tensordict")
    client.send(stored.tensordict(16.0), "tensordict")
    client.memmap(TensorDict({"scalar": torch.tensor(2.5), "t": "x"}, []), "no rows")
    client.publish("policy", stored.weights(1), metadata={"step": 1})
    client.publish("policy", stored.weights(2), metadata={"step": 2})
    replay = client.create_replay(
        "replay",
        like=stored.row(0),
        capacity=stored.CAPACITY,
        sampler=tdserve.Prioritized(alpha=1.0, beta=0.4),
        limiter=tdserve.SampleToInsertRatio(8.0, min_size=2, error_buffer=100),
        policy="policy",
    )
    replay.extend(stored.rows(0, stored.CAPACITY))
    replay.sample(2)
    replay.extend(stored.rows(stored.CAPACITY, stored.NUM_INSERTED))
    replay.update_priority(torch.tensor(list(stored.PRIORITIES)), torch.tensor(list(stored.PRIORITIES.values())))
    entries = client.create_kv("entries", max_bytes=1 << 20, eviction="lru")
    for key, number in stored.ENTRIES.items():
        entries[key] = stored.row(number)
    client.init_remote(stored.small(), "small")
    queue = client.create_queue("queue", like=stored.row(0), max_size=10)
    queue.extend(stored.rows(0, 4))
    with queue.take(1):
        pass


def main() -> None:
    """Serves a new root, fills it, and packs it."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "root")
        with tdserve.Server(root, port=0) as server, server.client(transport="gloo") as client:
            fill(client)
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
            for path in sorted(root.rglob("*")):
                if path.name not in LEFT_OUT:
                    archive.add(path, str(path.relative_to(root)), recursive=False, filter=_anonymous)
        TARGET.write_bytes(gzip.compress(packed.getvalue(), compresslevel=9, mtime=0))


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mtime = 0
    return entry


if __name__ == "__main__":
    main()
