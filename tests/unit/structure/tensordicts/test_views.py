from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorClass, TensorDict, lazy_stack, set_lazy_legacy

from tdserve.base.errors import NotSupportedError
from tdserve.structure.building.build import build
from tdserve.structure.captures.capture import capture
from tdserve.structure.tensordicts.views import check_own_entries
from tests.sameness import difference


class Pair(TensorClass):
    """Holds a tensordict."""

    inner: TensorDict


def source() -> TensorDict:
    td = TensorDict(
        {"x": torch.arange(24).view(3, 4, 2), "n": TensorDict({"y": torch.arange(12.0).view(3, 4)}, [3, 4])}, [3, 4]
    )
    td["note"] = NonTensorData("note", batch_size=[3, 4])
    return td


LAZY: dict[str, Callable[[Any], Any]] = {
    "view": lambda td: td.view(12),
    "permute": lambda td: td.permute(1, 0),
    "transpose": lambda td: td.transpose(0, 1),
    "unsqueeze": lambda td: td.unsqueeze(1),
    "squeeze": lambda td: td[:, :1].squeeze(1),
    "of a view": lambda td: td.permute(1, 0).unsqueeze(0),
}


@pytest.mark.parametrize("kind", LAZY)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_capture_when_tensordict_is_a_lazy_view_then_has_what_it_shows(kind: str) -> None:
    with set_lazy_legacy(True):
        lazy = LAZY[kind](source())
        captured = capture(lazy)
    with set_lazy_legacy(False):
        expected = LAZY[kind](source())
        found = build(captured.spec, captured.tensors, captured.values)
        assert difference(expected, found) is None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_capture_when_a_lazy_view_is_a_destination_then_is_refused() -> None:
    with set_lazy_legacy(True):
        lazy = source().permute(1, 0)
    with pytest.raises(NotSupportedError, match="_PermutedTensorDict"):
        capture(lazy, is_destination=True)


@pytest.mark.parametrize("index", [0, slice(1, 3), torch.tensor([2, 0]), (slice(None), 1)])
def test_capture_when_tensordict_is_a_sub_tensordict_then_has_its_rows(index: Any) -> None:
    td = source().set("texts", NonTensorStack(*[NonTensorStack(*"abcd") for _ in range(3)]))
    captured = capture(td._get_sub_tensordict(index))
    found = build(captured.spec, captured.tensors, captured.values)
    assert difference(td[index], found) is None


def lazy() -> Any:
    """A lazy view."""
    with set_lazy_legacy(True):
        return source().permute(1, 0)


BORROWING: dict[str, Callable[[], Any]] = {
    "itself": lazy,
    "at key n": lambda: TensorDict({"x": torch.zeros(4), "n": lazy()}, [4]),
    "in a stack": lambda: TensorDict({"n": lazy_stack([lazy(), source().permute(1, 0)])}, []),
    "in a class": lambda: TensorDict({"n": Pair(inner=lazy(), batch_size=[4])}, []),
}


@pytest.mark.parametrize("kind", BORROWING)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_check_when_anything_shows_the_entries_of_others_then_refused_by_key(kind: str) -> None:
    td = BORROWING[kind]()
    with pytest.raises(NotSupportedError, match=r"f\(\) of a _PermutedTensorDict.*do that") as caught:
        check_own_entries(td, call="f()", advice="do that")
    assert ("'n'" in str(caught.value)) == (kind != "itself")


def test_check_when_a_part_of_something_locked_then_refused_as_long_as_that_is() -> None:
    whole = source().lock_()
    with pytest.raises(NotSupportedError, match="unlock the whole"):
        check_own_entries(whole["n"], call="f()", advice="do that")
    check_own_entries(whole, call="f()", advice="do that")
    whole.unlock_()
    check_own_entries(whole["n"].lock_(), call="f()", advice="do that")


def test_check_when_everything_is_its_own_then_nothing() -> None:
    entries = {"s": lazy_stack([source(), source()[0][None]]), "c": Pair(inner=source(), batch_size=[3])}
    check_own_entries(TensorDict(entries, []), call="f()", advice="do that")
