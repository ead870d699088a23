from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tensordict
import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    PersistentTensorDict,
    TensorDict,
    TypedTensorDict,
)
from tensordict.nn import TensorDictParams

from tdserve.structure import tensordict_private as module
from tests.house import parse
from tests.private_names import all_private_names
from tests.tensordict_versions import IS_OLD


class Typed(TypedTensorDict):
    """A typed tensordict of one field."""

    a: torch.Tensor


def make_td() -> TensorDict:
    """A tensordict of one entry."""
    return TensorDict({"a": torch.arange(2)}, [2])


VALUE: Any = NonTensorData("x", batch_size=[2])
VALUES: Any = NonTensorStack(NonTensorData("x"), NonTensorData("y"))
STACK: Any = LazyStackedTensorDict(TensorDict({}, []), TensorDict({}, []), stack_dim=0)
PARAMS: Any = TensorDictParams(make_td().float())
CONSOLIDATED: Any = make_td().consolidate()

NAMES: list[tuple[Any, str]] = [
    (tensordict, "_lazy"),
    (tensordict, "_td"),
    (tensordict._lazy, "_CustomOpTensorDict"),
    (tensordict._td, "_SubTensorDict"),
    (tensordict.utils, "_TENSORCLASS_MEMO"),
    (TensorDict, "_new_unsafe"),
    (make_td(), "_tensordict"),
    (make_td(), "_td_dim_names"),
    (make_td(), "_batch_size"),
    (make_td(), "_get_str"),
    (make_td(), "_check_unlock"),
    (make_td(), "_mark_consolidated_stale"),
    (make_td(), "_has_names"),
    (CONSOLIDATED, "_consolidated"),
    (STACK, "_td_dim_name"),
    (STACK, "_batch_size"),
    (STACK, "_clone"),
    (STACK, "_get_str"),
    (STACK, "_is_locked"),
    (STACK, "_hook_out"),
    (STACK, "_hook_in"),
    (VALUE, "_tensordict"),
    (VALUE, "_non_tensordict"),
    (VALUE, "_is_non_tensor"),
    (VALUE, "_update"),
    (VALUE, "_update_"),
    (VALUE, "_clone"),
    (VALUE, "_memmap_"),
    (VALUE, "_unbind"),
    (NonTensorData, "_from_tensordict"),
    (VALUES, "_update"),
    (VALUES, "_update_"),
    (VALUES, "_update_at_"),
    (VALUES, "_propagate_lock"),
    (VALUES, "_propagate_unlock"),
    (VALUES, "_lock_parents_weakrefs"),
    (VALUES, "_is_shared"),
    (VALUES, "_is_memmap"),
    (VALUES, "_has_names"),
    (VALUES, "_repr_parts"),
    (NonTensorStack, "_new_lazy_unsafe"),
    (tensordict.UnbatchedTensor, "_pass_through"),
    (PARAMS, "_param_td"),
    (PARAMS, "_get_post_hook"),
    (PARAMS, "_lock_content"),
    (Typed(a=torch.zeros(2), batch_size=[2]), "_source"),
    (make_td()._get_sub_tensordict(slice(1)), "_source"),
    (PersistentTensorDict, "_get_array"),
    (PersistentTensorDict, "_get_metadata"),
]

NEW = {
    "_mark_consolidated_stale",
    "_hook_out",
    "_hook_in",
    "_update_",
    "_update_at_",
    "_repr_parts",
}
"""Names that 0.15 has brought: 0.14 does without them."""


@pytest.mark.parametrize(("owner", "name"), NAMES, ids=[name for _, name in NAMES])
def test_tensordict_when_upgraded_then_still_has_the_name(owner: Any, name: str) -> None:
    assert hasattr(owner, name) or (IS_OLD and name in NEW)


def test_persistent_tensordict_when_made_then_has_a_backend(tmp_path: Path) -> None:
    td: Any = PersistentTensorDict(filename=str(tmp_path / "a.h5"), batch_size=[2], mode="w")
    td["a"] = torch.arange(2)
    assert module.is_tensor_array(td, module.get_array(td, "a"))
    assert hasattr(td, "_backend")
    assert module.get_array_dtype(td, "a") is torch.int64


def test_names_when_module_is_read_then_all_are_looked_for() -> None:
    used = all_private_names(parse(module.__name__, Path(module.__file__).read_text()))
    listed = {name for _, name in NAMES}
    assert used - listed == {"_backend"}  # has a test of its own
    assert listed - used == {"_is_locked", "_hook_out", "_hook_in"}  # the module sets them on ``self`` or in a dict


def test_fields_of_a_value_when_made_then_are_those_of_tensordict() -> None:
    assert module.make_value_fields("x").keys() == module.stored_fields(VALUE).keys()


def test_values_when_their_class_is_looked_at_then_are_values() -> None:
    assert module.is_value_class(NonTensorData)
    assert not module.is_value_class(TensorDict)
    assert module.is_transparent_class(tensordict.UnbatchedTensor)


def test_form_when_taken_then_batch_size_and_names_are_those_of_the_other() -> None:
    names: Any = ["x", None]
    td, other = make_td(), TensorDict({}, [3, 4], names=names)
    module.take_form(td, other)
    assert (td.batch_size, td.names) == (other.batch_size, ["x", None])


def test_stack_form_when_taken_then_dimension_and_name_are_those_of_the_other() -> None:
    rows = [TensorDict({}, [3]), TensorDict({}, [3])]
    td = LazyStackedTensorDict(*rows, stack_dim=0)
    module.take_stack_form(td, LazyStackedTensorDict(*rows, stack_dim=1, stack_dim_name="x"))
    assert (td.batch_size, td.names) == ((3, 2), [None, "x"])


def test_consolidated_when_looked_at_then_is_recognised() -> None:
    assert module.is_consolidated(CONSOLIDATED)
    assert not module.is_consolidated(make_td())


def test_params_when_made_with_a_lock_then_it_is_recognised() -> None:
    assert module.has_locked_content(TensorDictParams(make_td().float(), lock=True))
    assert not module.has_locked_content(PARAMS)
    assert not module.has_hooks(PARAMS)
