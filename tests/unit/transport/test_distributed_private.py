from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from tdserve.transport.distributed_private import make_gloo_options, set_timeout


def test_gloo_when_upgraded_then_still_has_its_options() -> None:
    assert hasattr(dist.ProcessGroupGloo, "_Options")


@pytest.mark.parametrize("name", ["_devices", "_timeout", "_threads"])
def test_gloo_options_when_upgraded_then_still_have_the_name(name: str) -> None:
    kind: Any = dist.ProcessGroupGloo
    assert hasattr(kind._Options(), name)


def test_gloo_options_when_made_then_have_what_was_asked_for() -> None:
    kind: Any = dist.ProcessGroupGloo
    device = kind.create_device(hostname="127.0.0.1")
    options = make_gloo_options(device, 1.5, num_threads=0)
    assert (options._timeout, options._threads, len(options._devices)) == (timedelta(seconds=1.5), 0, 1)


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch has no NCCL")
def test_nccl_options_when_timeout_is_set_then_have_it() -> None:
    options: Any = dist.ProcessGroupNCCL.Options()
    assert hasattr(options, "_timeout")
    set_timeout(options, timedelta(days=1))
    assert options._timeout == timedelta(days=1)
