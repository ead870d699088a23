"""The records of entries: what a value, a tensor or a tensordict is in a keyed store. Only clients look into them.

An entry of a store without a structure is a form (one byte) and, by form, the record of a value; an element as in
packed nodes; or a tensor (``tensor_records``). An entry of a store with a structure is the packed layout of that, and a
ValueBlock if it has value leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, is_tensor_collection, lazy_stack

from tdserve.base.errors import (
    InvalidRequestError,
    KeyNotFoundError,
    NotSupportedError,
    RemoteProtocolError,
    SpecMismatchError,
)
from tdserve.client.content.leaves import copy_contents
from tdserve.client.content.read_content import Destination, on_cpu
from tdserve.client.content.received import make_views
from tdserve.client.content.row_choice import count_rows
from tdserve.client.content.value_blocks import decode_values, encode_values
from tdserve.client.kv.tensor_records import (
    LARGE_BYTES,
    TENSOR_FORM,
    decode_tensor,
    encode_column,
    encode_tensor,
    find_form,
)
from tdserve.messages.content import write_layout
from tdserve.rules.kv.keyed_settings import Like
from tdserve.structure.building.build import build
from tdserve.structure.building.packing import pack, unpack
from tdserve.structure.captures.array_dicts import has_tensors, read_dict
from tdserve.structure.captures.capture import Captured, capture
from tdserve.structure.tensors.array_tensors import read_array
from tdserve.structure.tensors.listed_tensors import REMEDY, find_listed_tensor
from tdserve.structure.tensors.plain_tensors import to_plain
from tdserve.structure.tensors.torch_types import to_torch
from tdserve.structure.trees.tree import Path, Spec, check_matches
from tdserve.values.supported import ATOMS
from tdserve.values.value_bundles import SplitColumn
from tdserve.values.value_codec import PICKLED, decode_many, decode_value, encode_many, encode_value

TENSOR_KEY = "tensor"
"""Key of the only leaf in the structure of a store whose entries are tensors."""

_VALUE, _ELEMENT = range(2)
_VALUE_FORM, _ELEMENT_FORM, _PICKLED = bytes([_VALUE]), bytes([_ELEMENT]), bytes([PICKLED])

_SIMPLE_TYPES = {*ATOMS, list, tuple}
"""Of values that are never tensors or structures themselves."""

MIN_RUN = 4
"""Tensors of one form in a row, on average, from which on they are encoded together."""

Select = Sequence[Path] | None


class AnyRecords:
    """Records of entries of any structure.

    Args:
        store: Name, for errors.
        allow_pickle: Whether values of any type are accepted.
    """

    def __init__(self, store: str, *, allow_pickle: bool) -> None:
        self._store = store
        self._allow_pickle = allow_pickle

    def encode(self, key: str, value: Any) -> bytes:
        """Returns the record of one entry. Raises NotSupportedError for what cannot be stored."""
        try:
            return self._encode(key, value)
        except RecursionError:
            reason = "it contains itself, or its containers are nested too deep"
            raise NotSupportedError(feature=f"the value of entry {key!r} of {self._store!r}", reason=reason) from None

    def _encode(self, key: str, value: Any) -> bytes:
        if isinstance(value, torch.Tensor) and not value.is_nested and value.layout is not torch.jagged:
            return encode_tensor(to_plain(value, (key,), store=self._store))
        try:
            return self._encode_plainly(key, value)
        except (NotSupportedError, RecursionError):
            if not self._allow_pickle:
                raise
        if is_tensor_collection(value) or isinstance(value, torch.Tensor):
            return _ELEMENT_FORM + encode_value(pack(value), key=key, allow_pickle=True)
        return _VALUE_FORM + encode_value(value, key=key, allow_pickle=True)

    def _encode_plainly(self, key: str, value: Any) -> bytes:
        """Returns the record of an entry that needs no pickle, which every client reads."""
        given = value
        if isinstance(value, dict) and has_tensors(value):
            value = read_dict(value, store=self._store)
        try:
            if is_tensor_collection(value) or isinstance(value, torch.Tensor):
                return _ELEMENT_FORM + encode_value(pack(value), key=key)
            return _VALUE_FORM + encode_value(value, key=key)
        except NotSupportedError as error:
            feature, reason = f"{error.feature} of {self._store!r}", error.reason
            if (place := find_listed_tensor(given)) is not None:
                feature, reason = f"a tensor in a list, at {place} of entry {key!r} of {self._store!r},", REMEDY
            raise NotSupportedError(feature=feature, reason=reason) from error

    def encode_many(self, keys: Sequence[str], values: Any, *, copies: bool = True) -> SplitColumn:
        """Returns the records of several entries: of each item of a list, or of each row of a tensordict or tensor.

        Args:
            copies: Whether the values may change before the records are used.
        """
        if len(keys) and isinstance(values, torch.Tensor) and find_form(values) is not None:
            _check_num_rows(keys, values)
            return encode_column(values, copies=copies)
        if len(keys) and isinstance(values, torch.Tensor) and not values.is_nested:
            values = to_plain(values, tuple(keys[:1]), store=self._store)  # not every kind of tensor has rows
        listed = _list_values(keys, values)
        runs = [(form, len(list(run))) for form, run in groupby(map(find_form, listed))]
        if len(runs) * MIN_RUN >= len(listed):
            return SplitColumn.from_values(self._encode_each(keys, listed))
        columns, begin = [], 0
        for form, num_values in runs:
            run = slice(begin, begin + num_values)
            if form is None:
                columns.append(SplitColumn.from_values(self._encode_each(keys[run], listed[run])))
            else:
                columns.append(encode_column(listed[run], copies=copies))
            begin += num_values
        return SplitColumn.join(columns)

    def _encode_each(self, keys: Sequence[str], listed: Sequence[Any]) -> list[bytes]:
        are_simple = [_is_simple(value) for value in listed]
        try:  # in one pass: a tenth of the time
            simple = iter(encode_many([value for value, is_one in zip(listed, are_simple, strict=True) if is_one]))
        except NotSupportedError:  # each by itself: it may be pickled, or the error names its key
            return [self.encode(key, value) for key, value in zip(keys, listed, strict=True)]
        return [
            _VALUE_FORM + next(simple) if is_one else self.encode(key, value)
            for key, value, is_one in zip(keys, listed, are_simple, strict=True)
        ]

    def decode(self, key: str, record: bytes, select: Select) -> Any:
        """Returns the value of a record."""
        form = record[0] if record else None
        if form == TENSOR_FORM:
            found: Any = decode_tensor(record)
        elif form in (_VALUE, _ELEMENT):
            found = decode_value(record[1:], key=key, allow_pickle=self._allow_pickle)
            found = unpack(found) if form == _ELEMENT else found
        else:
            raise RemoteProtocolError(expected="the record of an entry", received=f"form {form}")
        return found if select is None else _select(found, select, key, self._store)

    def decode_many(self, keys: Sequence[str], records: Sequence[bytes], select: Select) -> Any:
        """Returns the values of several records, in a list."""
        are_simple = [record[:1] == _VALUE_FORM and record[1:2] != _PICKLED for record in records]
        found = (record[1:] for record, is_one in zip(records, are_simple, strict=True) if is_one and select is None)
        simple = iter(decode_many(list(found)))
        return [
            next(simple) if is_one and select is None else self.decode(key, record, select)
            for key, record, is_one in zip(keys, records, are_simple, strict=True)
        ]


class LikeRecords:
    """Records of entries of one structure.

    Args:
        store: Name, for errors.
        spec: Structure of an entry.
        is_tensor: Whether an entry is the only leaf of the structure.
        allow_pickle: Whether values of any type are accepted.
    """

    def __init__(self, store: str, spec: Spec, *, is_tensor: bool, allow_pickle: bool) -> None:
        self._store = store
        self._spec = spec
        self._is_tensor = is_tensor
        self._allow_pickle = allow_pickle
        self._layout = write_layout(spec, is_packed=True)
        self._stored = spec.prepend((1,))
        self._has_values = bool(spec.values)

    def encode(self, key: str, value: Any) -> bytes:
        """Returns the record of one entry. Raises SpecMismatchError if it has another structure."""
        if self._is_tensor and isinstance(value, torch.Tensor):
            value = to_plain(value, (key,), store=self._store)
        captured = self._capture(value, self._spec)
        contents = copy_contents(captured)
        parts = [contents[slot.path].data for slot in self._layout.slots]
        record = b"".join(parts).ljust(self._layout.nbytes, b"\0")
        if not self._has_values:
            return record
        return record + encode_values(
            captured.spec, captured.values, store=self._store, allow_pickle=self._allow_pickle
        )

    def encode_many(self, keys: Sequence[str], values: Any, *, copies: bool = True) -> SplitColumn:
        """Returns the records of several entries: of each item of a list, or of each row of a tensordict or tensor.

        Args:
            copies: Whether the values may change before the records are used.
        """
        values = self._read_arrays(values, is_one=False)
        if self._has_values or isinstance(values, (list, tuple)):
            listed = _list_values(keys, values)
            return SplitColumn.from_values([self.encode(key, value) for key, value in zip(keys, listed, strict=True)])
        _check_num_rows(keys, values)
        if not keys:
            return SplitColumn.from_values([])
        contents = copy_contents(self._capture(values, self._stored.with_rows(len(keys))))
        table: NDArray[np.uint8] = np.zeros((len(keys), self._layout.nbytes), np.uint8)
        for slot in self._layout.slots:
            table[:, slot.offset : slot.offset + slot.nbytes] = contents[slot.path].reshape(len(keys), slot.nbytes)
        return SplitColumn(np.full(len(keys), self._layout.nbytes), [[table.reshape(-1).data]])

    def decode(self, key: str, record: bytes, select: Select) -> Any:
        """Returns the value of a record."""
        self._check_size(record)
        content = bytearray(record[: self._layout.nbytes])
        flat = torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
        leaves = dict(zip(self._layout.leaf_paths, make_views(self._layout, flat), strict=True))
        if self._is_tensor:
            return leaves[TENSOR_KEY,] if select is None else _select(leaves, select, key, self._store)
        spec = self._spec
        values: dict[Path, Any] = {}
        if self._has_values:
            spec, values = decode_values(spec, record[self._layout.nbytes :], allow_pickle=self._allow_pickle)
        found = build(on_cpu(spec), leaves, values)
        return found if select is None else _select(found, select, key, self._store)

    def decode_many(self, keys: Sequence[str], records: Sequence[bytes], select: Select) -> Any:
        """Returns the values of several records, stacked along a new first dimension."""
        if not records:
            empty = self._make_empty()
            return empty if select is None else _select(empty, select, "", self._store)
        if self._has_values:
            return self._stack([self.decode(key, record, select) for key, record in zip(keys, records, strict=True)])
        for record in records:
            self._check_size(record)
        table = np.frombuffer(b"".join(records), np.uint8).reshape(len(records), -1)
        leaves = {}
        for slot in self._layout.slots:
            column = np.ascontiguousarray(table[:, slot.offset : slot.offset + slot.nbytes])
            column = column if column.base is None else column.copy()
            leaf = torch.from_numpy(column.reshape(-1)).view(to_torch(slot.dtype))
            leaves[slot.path] = leaf.view(len(records), *slot.shape)
        if self._is_tensor:
            return leaves[TENSOR_KEY,] if select is None else _select(leaves, select, keys[0], self._store)
        found = build(on_cpu(self._stored.with_rows(len(records))), leaves, {})
        return found if select is None else _select(found, select, keys[0], self._store)

    def copy_into(self, out: Any, records: Sequence[bytes], *, is_one: bool) -> bool:
        """Copies the content of records straight into a tensordict or tensor in memory that fits it.

        Args:
            out: The place.
            records: One for each of its rows.
            is_one: Whether it is a place for one entry, without a dimension for them.

        Returns:
            False if it was not done, since entries have values, or the place is not contiguous or on a device.

        Raises:
            SpecMismatchError, NotSupportedError: The place does not fit, or cannot be written. Nothing was written.
        """
        spec = self._spec if is_one else self._stored.with_rows(len(records))
        is_tensor = isinstance(out, torch.Tensor)
        if self._has_values or is_tensor is not self._is_tensor or (is_tensor and not _has_batch(out, spec)):
            return False
        destination = Destination(wrap_tensor(out, spec.batch_size) if is_tensor else out, store=self._store)
        destination.check(spec)
        layout = write_layout(spec, is_packed=True)
        places = destination.find_places(layout)
        if places is None or places.contents is None:
            return False
        for record in records:
            self._check_size(record)
        contents = dict(zip(layout.leaf_paths, places.contents, strict=True))
        targets = [
            (contents[slot.path].reshape(len(records), slot.nbytes), slice(slot.offset, slot.offset + slot.nbytes))
            for slot in self._layout.slots
        ]
        joins = self._layout.nbytes < LARGE_BYTES  # quicker than a copy of each piece
        pieces = [b"".join(records)] if joins else records
        tables = (np.frombuffer(piece, np.uint8).reshape(-1, self._layout.nbytes) for piece in pieces if piece)
        for number, table in enumerate(tables):
            for target, columns in targets:
                target[number : number + len(table)] = table[:, columns]
        destination.mark_changed()
        return True

    def _make_empty(self) -> Any:
        """Returns a stack of no entries."""
        spec = on_cpu(self._spec.prepend((0,)))
        tensors = {path: torch.empty(leaf.shape, dtype=to_torch(leaf.dtype)) for path, leaf in spec.tensors}
        values: dict[Path, Any] = {path: [] for path, _ in spec.values}
        return tensors[TENSOR_KEY,] if self._is_tensor else build(spec, tensors, values)

    def _stack(self, rows: list[Any]) -> Any:
        try:
            return torch.stack(rows)
        except RuntimeError:  # ragged leaves differ in size
            return lazy_stack(rows)

    def _capture(self, value: Any, expected: Spec) -> Captured:
        value = self._read_arrays(value)
        if self._is_tensor:
            if not isinstance(value, torch.Tensor):
                raise SpecMismatchError(store=self._store, key="", expected="a tensor", actual=type(value).__name__)
            value = wrap_tensor(value, expected.batch_size)
        elif not is_tensor_collection(value):
            raise SpecMismatchError(store=self._store, key="", expected="a tensordict", actual=type(value).__name__)
        captured = capture(value, store=self._store, like=expected, allow_pickle=self._allow_pickle)
        if captured.spec is not expected:
            check_matches(expected, captured.spec, store=self._store)
        return captured

    def _read_arrays(self, value: Any, *, is_one: bool = True) -> Any:
        """Returns a dict of arrays as a tensordict, an array as a tensor, and anything else as it is."""
        if self._is_tensor:
            dtype = dict(self._spec.tensors)[TENSOR_KEY,].dtype
            return read_array(value, store=self._store, dtype=dtype) if isinstance(value, np.ndarray) else value
        return read_dict(value, self._spec, store=self._store, is_one=is_one) if isinstance(value, dict) else value

    def _check_size(self, record: bytes) -> None:
        nbytes = self._layout.nbytes
        if len(record) < nbytes or (len(record) > nbytes and not self._has_values):
            raise RemoteProtocolError(expected=f"a record of {nbytes} bytes", received=f"{len(record)}")


Records = AnyRecords | LikeRecords


def _has_batch(tensor: torch.Tensor, spec: Spec) -> bool:
    """Returns whether a tensor is dense, and begins with the batch size of a structure."""
    return not tensor.is_nested and tensor.shape[: len(spec.batch_size)] == spec.batch_size


def make_records(store: str, like: Like, spec: Spec, *, allow_pickle: bool) -> Records:
    """Returns what encodes and decodes the records of a store with these settings."""
    if like == "any":
        return AnyRecords(store, allow_pickle=allow_pickle)
    return LikeRecords(store, spec, is_tensor=like == "tensor", allow_pickle=allow_pickle)


def wrap_tensor(tensor: torch.Tensor, batch_size: Sequence[int] = ()) -> Any:
    """Returns the tensordict that stands for a tensor of a store of tensors."""
    return TensorDict({TENSOR_KEY: tensor}, batch_size)


def _list_values(keys: Sequence[str], values: Any) -> Sequence[Any]:
    """Returns one value per key: the items of a list, or the rows of a tensordict or tensor."""
    if isinstance(values, (list, tuple)):
        if len(values) != len(keys):
            raise InvalidRequestError(argument="values", reason=f"{len(values)} values for {len(keys)} keys")
        return values
    _check_num_rows(keys, values)
    return values.unbind(0)  # type: ignore[no-any-return]


def _check_num_rows(keys: Sequence[str], values: Any) -> None:
    is_rows = isinstance(values, torch.Tensor) or is_tensor_collection(values)
    if not is_rows:
        reason = f"several keys take a list of values, a tensordict or a tensor, not a {type(values).__name__}"
        raise InvalidRequestError(argument="values", reason=reason)
    num_rows = count_rows(values)
    if num_rows != len(keys):
        reason = f"a first dimension of {[] if num_rows is None else [num_rows]} for {len(keys)} keys"
        raise InvalidRequestError(argument="values", reason=reason)


def _is_simple(value: Any) -> bool:
    """Returns whether a value may be encoded together with others: it is no tensor, and no dict with tensors."""
    try:
        return type(value) in _SIMPLE_TYPES or (type(value) is dict and not has_tensors(value))
    except RecursionError:  # it contains itself; encoded by itself, it is pickled or refused with its key
        return False


def _select(found: Any, select: Sequence[Path], key: str, store: str) -> Any:
    if not is_tensor_collection(found):
        reason = f"the entry {key!r} of {store!r} is not a tensordict, and has no keys to select"
        raise InvalidRequestError(argument="select", reason=reason)
    for path in select:
        if found.get(path, None) is None:
            listing = f"client.kv({store!r}).get({key!r}).keys(True)"
            raise KeyNotFoundError(store=store, entry=key, key=".".join(path), listing=listing)
    return found.select(*select)
