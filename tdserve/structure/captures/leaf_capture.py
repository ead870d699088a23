"""Captures the leaves of a tensordict, tensors and non-tensor values, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from tensordict import NonTensorStack, UnbatchedTensor

from tdserve.base.errors import InvalidSpecError, NotSupportedError
from tdserve.structure.captures import unbatched
from tdserve.structure.captures.captured import EncodedValues
from tdserve.structure.captures.fake_tensors import has_no_content, to_meta
from tdserve.structure.stacks.common_structure import CapturedPart
from tdserve.structure.stacks.elements import Element, flatten_elements, list_values, make_nested_leaf, split_elements
from tdserve.structure.tensordicts.live_values import LiveEntry
from tdserve.structure.tensordicts.state import PLAIN, read_mark
from tdserve.structure.tensors.file_tensors import FileTensor
from tdserve.structure.tensors.listed_tensors import REMEDY, find_listed_tensor
from tdserve.structure.tensors.pieces import Jagged
from tdserve.structure.tensors.plain_tensors import is_dense, to_plain
from tdserve.structure.tensors.torch_types import FROM_TORCH
from tdserve.structure.torch_private import FakeTensor, is_fake_parameter
from tdserve.structure.trees.matching import quote, show
from tdserve.structure.trees.nodes import MAX_DIMS, PACKED, Entry, Path, TensorKind, TensorLeaf, ValueLeaf
from tdserve.values.supported import check_values
from tdserve.values.value_codec import encode_many


class LeafReader:
    """Capture of the leaves in one pass over a tensordict; a subclass walks over the nodes.

    Args:
        store: Name, for errors.
        is_destination: As in ``capture``.
        packed: Paths where elements carry their own structure.
        checks: Whether values are checked for what cannot be sent.
        encodes: Whether checked values may be kept encoded.
        is_exact, takes_structure: As in ``capture``.

    Attributes:
        tensors: Those found so far, by path.
        values: Those found so far, by path.
    """

    def __init__(
        self,
        store: str,
        is_destination: bool,
        packed: frozenset[Path] = frozenset(),
        *,
        checks: bool = True,
        encodes: bool = True,
        is_exact: bool = False,
        takes_structure: bool = False,
    ) -> None:
        self.store = store
        self.checks = checks
        self.encodes = encodes
        self.is_destination = is_destination
        self.is_exact = is_exact
        self.takes_structure = takes_structure
        self.packed = packed
        self.tensors: dict[Path, torch.Tensor] = {}
        self.values: dict[Path, Any] = {}

    def _capture_nested(self, item: torch.Tensor, path: Path, batch_size: tuple[int, ...]) -> ValueLeaf:
        jagged = Jagged.from_tensor(item)
        if (item if jagged is None else jagged.values).is_meta:
            raise self._make_capture_error("a nested meta tensor", path, "what its rows have in common is not in it")
        if jagged is not None:
            self._make_plain(jagged.values, path)
        size = item.size(0) if jagged is None else len(jagged.offsets) - 1
        if batch_size and size != batch_size[0]:
            raise self._make_contradiction_error(path, (size,), batch_size)
        leaf, self.values[path] = make_nested_leaf(item, batch_size)
        if not self.is_exact or self._mark(item, path) == PLAIN:
            return leaf
        if not item.requires_grad or isinstance(item, torch.nn.Parameter):
            raise self._make_capture_error("a nested tensor that is a parameter or buffer", path, "give a plain one")
        if leaf.ragged == PACKED:
            self.values[path] = Element(item)
            return leaf
        return leaf._replace(requires_grad=True)

    def _capture_tensor(self, item: torch.Tensor, kind: type, path: Path, batch_size: tuple[int, ...]) -> Entry:
        if kind is UnbatchedTensor:
            return self._capture_unbatched(item, path, batch_size)
        jagged = Jagged.from_tensor(item)
        if (jagged is not None and jagged.values.dtype in FROM_TORCH) or (item.is_nested and item.dtype in FROM_TORCH):
            return self._capture_nested(item, path, batch_size)
        given = item
        if kind is not FileTensor:
            item = self._make_plain(item, path)
        dtype = FROM_TORCH[item.dtype]
        shape = tuple(item.shape)
        if shape[: len(batch_size)] != batch_size:
            raise self._make_contradiction_error(path, shape, batch_size)
        if len(shape) > MAX_DIMS:
            raise self._make_capture_error(
                f"a tensor of {len(shape)} dimensions", path, f"at most {MAX_DIMS} are possible"
            )
        if self.is_destination:
            self._check_destination(item, path)
        elif item.is_neg() or (item.is_complex() and item.is_conj()):
            item = item.resolve_neg().resolve_conj()
        self.tensors[path] = item
        if not self.is_exact or kind is FileTensor:
            return TensorLeaf(dtype, shape)
        return TensorLeaf(dtype, shape, *self._mark(given, path))

    def _capture_unbatched(self, item: torch.Tensor, path: Path, batch_size: tuple[int, ...]) -> ValueLeaf:
        if self.is_exact and item.requires_grad:
            raise self._make_capture_error("an UnbatchedTensor that requires grad", path, "detach it")
        self.values[path] = unbatched.to_value(item)
        return ValueLeaf(batch_size, False, is_unbatched=True)

    def _mark(self, item: torch.Tensor, path: Path) -> tuple[TensorKind, bool]:
        if type(item) is FakeTensor:
            return TensorKind.PARAMETER if is_fake_parameter(item) else TensorKind.PLAIN, item.requires_grad
        try:
            return read_mark(item)
        except NotSupportedError as error:
            raise self._make_capture_error(error.feature, path, error.reason) from None

    def _make_plain(self, item: torch.Tensor, path: Path) -> torch.Tensor:
        if self.takes_structure and is_dense(item) and has_no_content(item):
            return self._make_blank(item, path)
        return to_plain(item, path, store=self.store)

    def _make_blank(self, item: torch.Tensor, path: Path) -> torch.Tensor:
        found = to_meta(item)
        if found is None:
            what = "a meta tensor" if item.is_meta else "a fake tensor"
            raise self._make_capture_error(what, path, "its sizes are symbols")
        return found

    def _check_stacked(self, parts: Iterable[CapturedPart], stacked: Mapping[Path, torch.Tensor]) -> None:
        """Raises NotSupportedError if rows without content differ: they would have to be stored row by row."""
        for part in parts:
            for path, tensor in part.tensors.items():
                if has_no_content(tensor) and path not in stacked:
                    raise self._make_capture_error(
                        "a meta tensor", path, "rows that differ in structure are their content"
                    )

    def _check_destination(self, item: torch.Tensor, path: Path) -> None:
        if item.is_neg() or (item.is_complex() and item.is_conj()):
            raise self._make_capture_error(
                "a conjugate or negative view as destination", path, "give its .resolve_conj() clone"
            )
        if not item.is_contiguous() and any(
            stride == 0 and size > 1 for stride, size in zip(item.stride(), item.shape, strict=True)
        ):
            raise self._make_capture_error(
                "an expanded tensor as destination", path, "its elements share memory, give a clone"
            )

    def _capture_value(self, item: Any, path: Path, batch_size: tuple[int, ...]) -> ValueLeaf:
        if isinstance(item, LiveEntry):
            item = item.to_plain()
        own = tuple(item.batch_size)
        if own[: len(batch_size)] != batch_size:
            raise self._make_contradiction_error(path, own, batch_size)
        is_stack = isinstance(item, NonTensorStack)
        if path in self.packed or (is_stack and -1 in own):
            self._check_values(lambda: list(_iter_values(item)), path)
            self.values[path] = split_elements(item, batch_size)
            return ValueLeaf(batch_size, bool(batch_size), PACKED)
        value = list_values(item) if is_stack else item.data
        if is_stack and not _has_rows(value, own):
            raise self._make_capture_error(
                "a ragged NonTensorStack", path, f"it does not have one value per row of {own}"
            )
        if self.checks and self.encodes and is_stack and len(own) == 1:
            value = self._encode_values(value, path)
        else:
            self._check_values(lambda: flatten_elements(value, len(own)) if is_stack else (value,), path)
        self.values[path] = value
        return ValueLeaf(own, is_stack)

    def _capture_bare_value(self, value: Any, path: Path, batch_size: tuple[int, ...]) -> ValueLeaf:
        self._check_values(lambda: (value,), path)
        self.values[path] = value
        return ValueLeaf(batch_size, False)

    def _check_values(self, list_held: Callable[[], Sequence[Any]], path: Path) -> None:
        """Checks values, which are listed only for that."""
        if not self.checks:
            return
        values = list_held()
        try:
            check_values(values, key=show(path))
        except NotSupportedError as error:
            raise self._add_place(error, values, path) from None

    def _encode_values(self, values: list[Any], path: Path) -> EncodedValues:
        """Returns values with their records, whose making checks them too."""
        try:
            return EncodedValues(values, encode_many(values, key=show(path)))
        except NotSupportedError as error:
            raise self._add_place(error, values, path) from None

    def _add_place(self, error: NotSupportedError, values: Sequence[Any], path: Path) -> NotSupportedError:
        """Returns the refusal of values with the name of the store, and what to do about a tensor among them."""
        store = f" of store {self.store!r}" if self.store else ""
        held = values[0] if len(values) == 1 else values
        if (place := find_listed_tensor(held)) is None:
            return NotSupportedError(feature=error.feature + store, reason=error.reason)
        return NotSupportedError(feature=f"a tensor in a list, at {quote(path)}{place}{store},", reason=REMEDY)

    def _make_capture_error(self, what: str, path: Path, reason: str) -> NotSupportedError:
        where = f" at key {quote(path)}" if path else ""
        store = f" of store {self.store!r}" if self.store else ""
        return NotSupportedError(feature=f"{what}{where}{store}", reason=reason)

    def _make_contradiction_error(
        self, path: Path, shape: tuple[int, ...], batch_size: tuple[int, ...]
    ) -> InvalidSpecError:
        reason = f"key {quote(path)} has shape {shape}, which does not start with the batch size {batch_size}"
        return InvalidSpecError(store=self.store, reason=reason)


def _has_rows(value: Any, batch_size: tuple[int, ...]) -> bool:
    if not batch_size:
        return True
    if not isinstance(value, list) or len(value) != batch_size[0]:
        return False
    return len(batch_size) == 1 or all(_has_rows(row, batch_size[1:]) for row in value)


def _iter_values(item: Any) -> Iterable[Any]:
    """Yields every value of nested stacks."""
    if not isinstance(item, NonTensorStack):
        return (item.data,)
    return [single for member in item.tensordicts for single in _iter_values(member)]
