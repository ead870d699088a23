"""The private names of ``torch.distributed`` that tdserve uses; those of torch are in ``structure/torch_private.py``.

Seen in torch 2.13.0. ``tests/unit/transport/test_distributed_private.py`` checks each name, so if an upgrade removes
one, the test fails by its name.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist


def make_gloo_options(device: Any, timeout_s: float, *, num_threads: int) -> Any:
    """Returns options of a ProcessGroupGloo, whose constructor has no public argument for the device or the threads.

    Args:
        device: A device of ``ProcessGroupGloo.create_device``.
        timeout_s: Timeout of its operations.
        num_threads: Threads that run collectives; with 0 the caller's thread does.
    """
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [device]
    options._timeout = timedelta(seconds=timeout_s)
    options._threads = num_threads
    return options


def set_timeout(options: Any, timeout: timedelta) -> None:
    """Sets the timeout in options of a ProcessGroupNCCL; otherwise only ``new_group`` can set it."""
    options._timeout = timeout
