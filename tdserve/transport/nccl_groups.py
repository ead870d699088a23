"""Makes NCCL groups; the only place that does, after it has set what torch and NCCL read only once."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tdserve.base.addresses import find_interface_name
from tdserve.base.config import read_client_interface, set_variables
from tdserve.transport.distributed_private import set_timeout
from tdserve.transport.rendezvous import KVStore

NEVER = timedelta(days=365)
"""Timeout of torch's own clock, which would end the process."""

FORM_TIMEOUT_S = 30
"""Timeout of NCCL's own handshake: torch's default is half an hour."""

_VARIABLES = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": str(FORM_TIMEOUT_S),
}
"""Variables that torch reads when a group is made, the last one once. Without the first three a peer's death would end
this process."""


def prepare_process(interface: str | None = None) -> None:
    """Sets the variables that torch and NCCL read, for the life of the process, before its first group; idempotent.

    Variables that the user has set stay. Groups that the user makes later see these variables too. NCCL reads the
    interface once per process.

    Args:
        interface: Address or name of the interface for content; None takes that of ``TDSERVE_INTERFACE``, "" leaves
            the choice to NCCL.
    """
    chosen = read_client_interface() or "" if interface is None else interface
    name = find_interface_name(chosen) if chosen else None
    set_variables(_VARIABLES | ({"NCCL_SOCKET_IFNAME": f"={name}"} if name else {}))


def make_group(kv_store: KVStore, rank: int, device: torch.device, *, world_size: int = 2) -> Any:
    """Makes a ProcessGroupNCCL whose faults we handle. Its first call forms the connections.

    That call raises RuntimeError if they have not formed after ``FORM_TIMEOUT_S``, which works since the group does not
    block.
    """
    prepare_process()
    with torch.cuda.device(device):
        options: Any = dist.ProcessGroupNCCL.Options()
        set_timeout(options, NEVER)
        options.config.blocking = 0
        return dist.ProcessGroupNCCL(kv_store, rank, world_size, options)


def abort_group(group: Any) -> None:
    """Ends everything under way in a group; may take as long as its kernels do."""
    with suppress(RuntimeError):
        group.abort()
