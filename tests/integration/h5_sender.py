"""A process that sends a file, HDF5 or memory-mapped, with far less memory than the file is long.

Arguments: address, transport, file, room in bytes, call.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import Any

import h5py
import torch
from tensordict import PersistentTensorDict, TensorDict

import tdserve


def limit_memory(room_nbytes: int) -> None:
    """Limits the private memory that this process may still allocate; mapped files do not count."""
    lines = Path("/proc/self/status").read_text().splitlines()
    used_kib = next(int(line.split()[1]) for line in lines if line.startswith("VmData"))
    limit = used_kib * 1024 + room_nbytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def main() -> None:
    """Sends, and ends with 0 when it was taken."""
    address, file, room_nbytes, call = sys.argv[1], *sys.argv[3:]
    transport: Any = sys.argv[2]
    td: Any
    if file.endswith(".h5"):
        with h5py.File(file) as opened:
            num_rows = len(opened["pixels"])
        td = PersistentTensorDict(filename=file, batch_size=[num_rows])
    else:
        td = TensorDict.load_memmap(file)
    row = TensorDict({"pixels": torch.zeros(td["pixels"].shape[1:], dtype=torch.uint8)}, [])
    with tdserve.connect(address, transport=transport, timeout_s=60.0) as client:
        client.init_remote(TensorDict({"x": torch.zeros(1 << 20)}, []), "warm")
        store: Any = None
        if call == "extend":
            store = client.create_replay("sent", row, td.batch_size[0])
        elif call == "set":
            store = client.memmap_like(row, "sent", batch_size=td.batch_size[:1])
        limit_memory(int(room_nbytes))
        if call == "init_remote":
            client.init_remote(td, "sent")
        elif call == "set":
            store[:] = td
        else:
            store.extend(td)


if __name__ == "__main__":
    main()
