"""Forms in which callers give rows to ``extend``: one row, rows in several dimensions, more rows than a ring has."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import torch
from tensordict import is_tensor_collection, lazy_stack

from tdserve.base.errors import InvalidRequestError, SpecMismatchError
from tdserve.client.content.row_choice import choose_rows, iter_tensors
from tdserve.client.tables.row_annotations import RowAnnotations
from tdserve.rules.replay.samplers.sampler import Sampler
from tdserve.structure.trees.tree import Spec, show


class GivenRows(NamedTuple):
    """Rows to store, and how the caller gave them.

    Attributes:
        batch: The rows, of batch size ``[n, *row]`` if they have a form that is known here.
        annotations: Theirs.
        shape: Shape of the row numbers that the caller gets.
        num_cut: Rows before these that are not stored; their number is -1.
    """

    batch: Any
    annotations: RowAnnotations
    shape: tuple[int, ...]
    num_cut: int = 0

    @classmethod
    def read(
        cls,
        batch: Any,
        annotations: RowAnnotations,
        row: Spec,
        sampler: Sampler,
        *,
        flatten: bool = False,
        store: str = "",
    ) -> GivenRows:
        """Reads rows in any form; what is in no known form stays as it is.

        Args:
            batch: As in ``TableHandle.extend``.
            annotations: One for each of the rows, or one for all.
            row: Structure of a row of the table.
            sampler: The table's.
            flatten: Whether all dimensions before those of a row are dimensions of rows.
            store: Name, for errors.

        Raises:
            InvalidRequestError: An annotation has neither the shape of the rows nor one element; or rows cannot be
                flattened.
            SpecMismatchError: They are several rows, whose batch size does not say so.
        """
        if not is_tensor_collection(batch) or isinstance(batch, type):
            return cls(batch, annotations, (-1,))
        if row.root.inner is not None:
            if flatten:
                reason = (
                    "rows that differ in batch size have no dimensions of their own to tell apart from those of rows"
                )
                raise InvalidRequestError(argument="flatten", reason=reason)
            return cls(batch, annotations, (-1,))
        batch_size = tuple(batch.batch_size)
        if batch_size == row.batch_size:
            _check_is_one(batch, row, store)
            return cls(lazy_stack([batch]) if row.packed else _add_row_dim(batch, store), annotations, (1,))
        num_dims = len(batch_size) - len(row.batch_size)
        if not flatten or num_dims < 2 or batch_size[num_dims:] != row.batch_size:
            return cls(batch, annotations, (-1,))
        shape = batch_size[:num_dims]
        annotations = annotations.flatten(shape)
        if sampler.uses_trajectories and (not sampler.trajectory_keys or sampler.marks_ends):
            annotations = annotations.end_lines(shape)
        return cls(batch.reshape(prod(shape), *row.batch_size), annotations, shape)

    @property
    def num_rows(self) -> int:
        """Number of rows; 0 if their form is not known."""
        batch_size = self.batch.batch_size if is_tensor_collection(self.batch) else ()
        return batch_size[0] if batch_size else 0

    def keep_newest(self, capacity: int) -> GivenRows:
        """Returns the newest rows, as many as a ring has; all if they are not more.

        Raises:
            InvalidRequestError: There are more or fewer annotations than rows.
        """
        num_cut = self.num_rows - capacity
        if num_cut <= 0:
            return self
        annotations = self.annotations.keep_last(capacity, num_rows=self.num_rows)
        return self._replace(
            batch=choose_rows(self.batch, slice(num_cut, None)), annotations=annotations, num_cut=num_cut
        )

    def restore(self, index: Any) -> Any:
        """Returns the row numbers, or a future of them, in the caller's form."""
        if isinstance(index, torch.Tensor):
            if self.num_cut:
                index = torch.cat([index.new_full((self.num_cut,), -1), index])
            return index.reshape(self.shape)
        return index.convert(self.restore)


def _check_is_one(batch: Any, row: Spec, store: str) -> None:
    for path, leaf in row.tensors[:1]:
        shape = tuple(getattr(batch.get(path, None), "shape", ()))
        if len(shape) > len(leaf.shape) and shape[1:] == leaf.shape:
            wanted = [shape[0], *row.batch_size]
            actual = f"{list(row.batch_size)} around shape {list(shape)}; give the tensordict batch_size={wanted}"
            raise SpecMismatchError(store=store, key=show(path), expected=f"batch size {wanted}", actual=actual)


def _add_row_dim(row: Any, store: str) -> Any:
    """Returns a row as a batch of one. A nested tensor of one component is the tensor of this row, as in ``like=``."""
    nested = {path: tensor for path, tensor in iter_tensors(row) if tensor.is_nested}
    found = row.exclude(*nested).unsqueeze(0) if nested else row.unsqueeze(0)
    for path, tensor in nested.items():
        if tensor.size(0) != 1 or (found.get(path[:-1]) if path[1:] else found).batch_size != (1,):
            actual = f"nested tensor of {tensor.size(0)} components"
            raise SpecMismatchError(store=store, key=show(path), expected="the tensor of one row", actual=actual)
        found.set(path, tensor)
    return found


def is_plain_batch(batch: Any, num_dims: int, capacity: int) -> bool:
    """Returns whether ``batch`` has the form that a table stores: its number of dimensions, and not too many rows."""
    size = getattr(batch, "batch_size", None)
    return type(size) is torch.Size and len(size) == num_dims and size[0] <= capacity


def suggest_form(num_extra_dims: int, row: Spec) -> str:
    """Returns what may have been meant by rows with this many batch dimensions too many."""
    if num_extra_dims > 0:
        return " (flatten=True takes rows in several dimensions)"
    return (
        f" (the like= of the table was a batch {list(row.batch_size)}, so that each row is one)"
        if row.batch_size
        else ""
    )


def add_form_hint(error: SpecMismatchError, row: Spec) -> SpecMismatchError:
    """Adds a hint to the error if a single row's batch size fits no row."""
    if error.key or not str(error.expected).startswith("batch size"):
        return error
    return error.with_fields(actual=f"{error.actual}{suggest_form(0, row)}")
