"""The private names of ``torch.distributed`` that tdserve uses; those of torch are in ``structure/torch_private.py``.

Seen in torch 2.13.0. ``tests/unit/transport/test_distributed_private.py`` looks for each, so that an upgrade
that takes one away fails there by its name.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist


def gloo_options(device: Any, timeout_s: float, *, num_threads: int) -> Any:
    """Options of a ProcessGroupGloo, whose constructor has no public argument for the device or the threads.

    Args:
        device: As ``ProcessGroupGloo.create_device`` makes it.
        timeout_s: Of its operations.
        num_threads: That run collectives; without any the caller's does.
    """
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [device]
    options._timeout = timedelta(seconds=timeout_s)
    options._threads = num_threads
    return options


def set_timeout(options: Any, timeout: timedelta) -> None:
    """Sets the timeout of options of a ProcessGroupNCCL, which only ``new_group`` sets otherwise."""
    options._timeout = timeout
