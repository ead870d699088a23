"""Views of memory without a tensor of its own: each has its own version counter.

In torch views of one tensor share their counter, so that an in-place change of one leaf would make a backward fail that
needs another.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tdserve.structure.torch_private import nothing_noted


def make_independent_views(make: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
    """Makes views that behave as if each were a tensor of its own over its memory.

    Args:
        make: Makes views of tensors that require no grad.
    """
    if nothing_noted is None:
        return [view.data for view in make()]
    with nothing_noted():
        return make()
