"""Views of memory that has no tensor of its own: each counts its versions for itself.

torch lets views of one tensor share their count, so that what is done in place to one leaf would fail a backward that
needs another.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tdserve.structure.torch_private import nothing_noted


def make_independent_views(make: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
    """Makes views, as if each were a tensor of its own over its memory.

    Args:
        make: Gives views of tensors that require no grad.
    """
    if nothing_noted is None:
        return [view.data for view in make()]
    with nothing_noted():
        return make()
