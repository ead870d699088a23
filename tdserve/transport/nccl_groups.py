"""Makes NCCL groups: the one place that does, after it has told torch and NCCL what they read only once."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tdserve.base.addresses import interface_name
from tdserve.base.config import client_interface, set_variables
from tdserve.transport.distributed_private import set_timeout
from tdserve.transport.rendezvous import KVStore

NEVER = timedelta(days=365)
"""Of torch's own clock, whose end is the process's."""

FORM_TIMEOUT_S = 30
"""For NCCL's own handshake: torch's default is half an hour."""

_VARIABLES = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": str(FORM_TIMEOUT_S),
}
"""Read by torch when a group is made, the last one once; without the first three a peer's death would be this
process's."""


def prepare_process(interface: str | None = None) -> None:
    """Sets the variables that torch and NCCL read, for the life of the process, before its first group; idempotent.

    What the user has set himself stays; where he has groups of his own, made later, they see these variables too. NCCL
    looks at the interface once in a process.

    Args:
        interface: Address or name of the interface for content; None takes that of ``TDSERVE_INTERFACE``, "" leaves
            the choice to NCCL.
    """
    chosen = client_interface() or "" if interface is None else interface
    name = interface_name(chosen) if chosen else None
    set_variables(_VARIABLES | ({"NCCL_SOCKET_IFNAME": f"={name}"} if name else {}))


def make_group(kv_store: KVStore, rank: int, device: torch.device, *, world_size: int = 2) -> Any:
    """A ProcessGroupNCCL whose faults are ours to handle. Its connections are formed by the first call.

    That call raises RuntimeError when they have not formed after ``FORM_TIMEOUT_S``: groups that do not block can.
    """
    prepare_process()
    with torch.cuda.device(device):
        options: Any = dist.ProcessGroupNCCL.Options()
        set_timeout(options, NEVER)
        options.config.blocking = 0
        return dist.ProcessGroupNCCL(kv_store, rank, world_size, options)


def abort_group(group: Any) -> None:
    """Ends whatever hangs in it; may last as long as its kernels do."""
    with suppress(RuntimeError):
        group.abort()
