"""Tensors of different shapes in one buffer: as lists, as stored bytes, as nested tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tdserve.base.errors import LocalProtocolError, RemoteProtocolError
from tdserve.structure.tensors.pieces import Pieces, build_jagged, encode_tensor, make_zero_blob, split_jagged
from tdserve.structure.trees.nodes import Form, Ragged
from tdserve.values.value_codec import NONE
from tdserve.values.value_columns import ValueColumn, decode_block, encode_block, join
from tests.ragged import CASES, check_same, jagged as nested

TENSORS = [torch.arange(6.0).view(3, 2), torch.empty(0, 2), torch.ones(1, 2)]
RAGGED = Ragged(Form.STACK, "float32", (-1, 2))


def shapes(pieces: Any) -> list[tuple[int, ...]]:
    return [tuple(piece.shape) for piece in pieces]


def test_pieces_when_made_of_tensors_then_they_are_its_elements() -> None:
    pieces = Pieces.from_tensors(TENSORS, RAGGED)
    assert len(pieces) == 3
    assert shapes(pieces) == [(3, 2), (0, 2), (1, 2)]
    assert torch.equal(pieces[-1], TENSORS[-1])
    assert [torch.equal(piece, tensor) for piece, tensor in zip(pieces, TENSORS, strict=True)] == [True] * 3


def test_pieces_when_sliced_then_a_part_of_the_same_memory() -> None:
    pieces = Pieces.from_tensors(TENSORS, RAGGED)
    assert shapes(pieces[1:]) == [(0, 2), (1, 2)]
    assert shapes(pieces[2:1]) == []
    assert shapes(pieces[::2]) == [(3, 2), (1, 2)]
    assert pieces[:1][0].data_ptr() == pieces[0].data_ptr()


def test_pieces_when_one_is_replaced_then_only_that_one_changes() -> None:
    pieces = Pieces.from_tensors(TENSORS, RAGGED)
    pieces[1] = torch.full((5, 2), 7.0)
    assert pieces.shapes[:, 0].tolist() == [3, 5, 1]
    assert torch.equal(pieces.join()[0].view(-1, 2)[3:8], pieces[1])
    assert torch.equal(Pieces.from_blobs(pieces.to_blobs(), RAGGED)[1], pieces[1])
    assert shapes(pieces[1:]) == [(5, 2), (1, 2)]


def test_blob_when_stored_then_its_shape_and_its_bytes() -> None:
    (blob,) = Pieces.from_tensors([torch.arange(2.0).view(1, 2)], RAGGED).to_blobs()
    assert blob == np.array([1, 2], "<i8").tobytes() + np.array([0, 1], "<f4").tobytes()


def test_split_when_asked_for_then_the_blobs_without_a_copy() -> None:
    pieces = Pieces.from_tensors(TENSORS, RAGGED)
    split = pieces.split()
    assert b"".join(split.get_parts()) == b"".join(pieces.to_blobs())
    assert split.sizes.tolist() == [len(blob) for blob in pieces.to_blobs()] == [40, 16, 24]
    pieces[0].fill_(9)
    assert np.frombuffer(split.pieces[1][0], "<f4").tolist() == [9] * 6
    pieces[1] = torch.full((5, 2), 7.0)
    assert pieces.split().sizes.tolist() == [40, 56, 24]
    assert Pieces.from_tensors([], RAGGED).split().get_parts() == []


@pytest.mark.parametrize("head_nbytes", [0, 8, 16])
def test_from_blobs_when_they_are_joined_then_the_same(head_nbytes: int) -> None:
    blobs = Pieces.from_tensors(TENSORS, RAGGED).to_blobs()
    for values in (blobs, [*blobs, NONE], [blobs[1]] * 2, []):
        found = Pieces.from_blobs(join(values, head_nbytes=head_nbytes), RAGGED)
        assert found.to_blobs() == Pieces.from_blobs(values, RAGGED).to_blobs()
        found.join()[0].zero_()  # it may be written to


def test_from_blobs_when_of_one_buffer_among_others_then_the_same() -> None:
    blobs = Pieces.from_tensors(TENSORS, RAGGED).to_blobs()
    (_, column), _ = decode_block(encode_block([ValueColumn(True, blobs), ValueColumn(True, [b"other"])]))
    assert Pieces.from_blobs(column, RAGGED).to_blobs() == blobs
    assert Pieces.from_blobs(column[1:], RAGGED).to_blobs() == blobs[1:]


def test_from_blobs_when_elements_are_numbers_then_they_have_no_head() -> None:
    ragged = Ragged(Form.STACK, "int64", ())
    found = Pieces.from_blobs(join([bytes([number]) + bytes(7) for number in range(3)]), ragged)
    assert torch.stack(list(found)).tolist() == [0, 1, 2]
    found.join()[0].zero_()


def test_from_blobs_when_joined_bytes_are_no_elements_then_refuses() -> None:
    blobs = Pieces.from_tensors(TENSORS, RAGGED).to_blobs()
    for values in ([*blobs, b""], [*blobs, blobs[0][:-1]], [*blobs, b"\xff" * 16]):
        for head_nbytes in (0, 8, 16):
            with pytest.raises(RemoteProtocolError):
                Pieces.from_blobs(join(values, head_nbytes=head_nbytes), RAGGED)


def test_from_blobs_when_nothing_was_written_then_empty() -> None:
    pieces = Pieces.from_blobs([NONE, make_zero_blob(RAGGED)], RAGGED)
    assert shapes(pieces) == [(0, 2), (0, 2)]


@pytest.mark.parametrize(
    "blob",
    [
        b"",
        b"\x01" * 15,
        np.array([1, 2], "<i8").tobytes(),
        np.array([1, 2], "<i8").tobytes() + b"\0" * 9,
        np.array([-1, -2], "<i8").tobytes() + b"\0" * 8,
        np.array([1, 3], "<i8").tobytes() + b"\0" * 12,
        np.array([0, 2**62], "<i8").tobytes(),
    ],
)
def test_from_blobs_when_bytes_are_no_element_then_refuses(blob: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="float32"):
        Pieces.from_blobs([blob], RAGGED)


def test_from_blobs_when_booleans_are_none_then_refuses() -> None:
    with pytest.raises(RemoteProtocolError, match="bool"):
        Pieces.from_blobs([np.array([1], "<i8").tobytes() + b"\x02"], Ragged(Form.JAGGED, "bool", (-1,)))


def test_of_when_tensors_differ_in_dtype_then_refuses() -> None:
    with pytest.raises(LocalProtocolError, match="float32"):
        Pieces.from_tensors([torch.zeros(1, 2, dtype=torch.int64)], RAGGED)


def test_stacked_when_all_have_one_shape_then_dense() -> None:
    dense = Pieces.from_rows(torch.arange(6).view(3, 2)).stack()
    assert dense is not None
    assert dense.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert Pieces.from_tensors(TENSORS, RAGGED).stack() is None
    assert Pieces.from_tensors([], RAGGED).stack() is None


def test_pieces_of_jagged_when_components_lie_side_by_side_then_no_copy() -> None:
    tensor = nested([2, 3])
    pieces = split_jagged(tensor)
    assert pieces[0].data_ptr() == tensor.values().data_ptr()


@pytest.mark.parametrize("case", ["jagged", "jagged, no rows", "jagged, with lengths", "jagged, transposed"])
def test_jagged_when_made_of_its_components_then_the_same(case: str) -> None:
    tensor: Any = CASES[case]["t"]
    at = tensor._ragged_idx - 1
    shape = tuple(-1 if dim == at else int(size) for dim, size in enumerate(tensor.shape[1:]))
    dtype = str(tensor.dtype).removeprefix("torch.")
    ragged = Ragged(Form.JAGGED, dtype, shape, tensor.lengths() is not None)
    check_same(tensor, build_jagged(split_jagged(tensor), ragged))


def test_tensors_when_one_element_is_a_column_of_a_larger_tensor_then_stored_as_its_copy_is() -> None:
    column, ragged = torch.tensor([[1.0, 2.0]])[:, 0], Ragged(Form.STACK, "float32", (-1,))
    assert encode_tensor(column) == encode_tensor(column.clone())
    assert Pieces.from_tensors([column], ragged).to_blobs() == Pieces.from_tensors([column.clone()], ragged).to_blobs()
