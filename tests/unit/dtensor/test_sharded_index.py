from __future__ import annotations

import json

import pytest

from tdserve.base.errors import CorruptDataError, NotSupportedError, SpecMismatchError
from tdserve.dtensor.shard_regions import Region, make_whole
from tdserve.dtensor.sharded_index import (
    IndexedLeaf,
    IndexedPiece,
    OwnedPiece,
    PartVersion,
    RankLeaf,
    ShardedIndex,
    assign_pieces,
    decode_index,
    index_plain,
)

ROWS = [Region((0, 0), (2, 3)), Region((2, 0), (1, 3))]


def make_leaf(*regions: Region, dtype: str = "float32", is_sharded: bool = True) -> RankLeaf:
    """Returns what a rank has of a leaf of three rows."""
    return RankLeaf(dtype, (3, 3), is_sharded, regions)


def test_index_when_encoded_then_decoded_is_equal() -> None:
    pieces = [IndexedPiece(number, (f"a.b#{number}",), region) for number, region in enumerate(ROWS)]
    leaves = {"a.b": IndexedLeaf("bfloat16", (3, 3), pieces), "c": IndexedLeaf("int64", (0,), [])}
    index = ShardedIndex("ab12", [PartVersion("w.part-0", 7, 2), PartVersion("w.part-1", 9, 1)], leaves, {"step": 3})
    assert decode_index(index.encode(), {"step": 3}, store="w") == index


def test_index_when_its_store_is_restored_under_another_name_then_parts_are_named_after_that() -> None:
    index = ShardedIndex("ab12", [PartVersion("w.part-0", 7, 2)], {})
    assert decode_index(index.encode(), {}, store="old-w").parts == [PartVersion("old-w.part-0", 7, 2)]


@pytest.mark.parametrize("text", ["", "[]", '{"format": 1}', '{"format": 1, "leaves": {"a": 3}}'])
def test_index_when_damaged_then_refused(text: str) -> None:
    with pytest.raises(CorruptDataError, match="weights 'w'"):
        decode_index(text, {}, store="w")


def test_index_when_of_another_format_then_refused() -> None:
    with pytest.raises(NotSupportedError, match="format 3 of sharded weights 'w'"):
        decode_index(json.dumps({"format": 3}), {}, store="w")


def test_pieces_when_several_ranks_have_a_box_then_one_publishes_it_and_loads_are_even() -> None:
    every = {f"leaf{number}": make_leaf(ROWS[number % 2], ROWS[1 - number % 2]) for number in range(4)}
    found = assign_pieces([every, every], store="w")
    assert [[piece.region for piece in owned] for owned in found.values()] == [ROWS] * 4
    loads = [0, 0]
    for owned in found.values():
        for piece in owned:
            loads[piece.rank] += piece.region.num_elements
    assert abs(loads[0] - loads[1]) <= 6
    keys = [piece.key for owned in found.values() for piece in owned]
    assert len({*keys}) == len(keys)


def test_pieces_when_a_leaf_is_plain_then_its_first_rank_publishes_it() -> None:
    whole = make_leaf(make_whole((3, 3)), is_sharded=False)
    found = assign_pieces([{}, {"a": whole}, {"a": whole}], store="w")
    assert found == {"a": [OwnedPiece(1, "a#0", make_whole((3, 3)))]}


def test_pieces_when_ranks_are_stages_then_each_publishes_its_leaves() -> None:
    found = assign_pieces([{"a": make_leaf(*ROWS)}, {"b": make_leaf(*ROWS)}], store="w")
    assert {name: {piece.rank for piece in owned} for name, owned in found.items()} == {"a": {0}, "b": {1}}


def test_pieces_when_some_are_nowhere_then_refused_by_key() -> None:
    with pytest.raises(SpecMismatchError, match=r"key 'a': expected all 9 elements .* got boxes with 6 elements"):
        assign_pieces([{"a": make_leaf(ROWS[0])}, {"a": make_leaf()}], store="w")


def test_pieces_when_boxes_have_the_right_size_together_but_leave_a_hole_then_refused_by_key_and_ranks() -> None:
    of_rows, of_columns = Region((0, 0), (3, 4)), Region((0, 2), (6, 2))
    ranks = [{"a": RankLeaf("float32", (6, 4), True, [region])} for region in (of_rows, of_columns)]
    with pytest.raises(SpecMismatchError, match=r"key 'a'.*\[0:3, 0:4\] at rank 0 and \[0:6, 2:4\] at rank 1"):
        assign_pieces(ranks, store="w")


@pytest.mark.parametrize(
    "regions",
    [
        [Region((0, 0), (2, 3)), Region((0, 0), (1, 3))],
        [Region((0, 0), (2, 3)), Region((3, 0), (1, 3))],
        [Region((0, 0), (2, 3))],
        [],
    ],
    ids=["overlap", "outside", "missing", "none"],
)
def test_index_when_pieces_leave_a_hole_then_refused(regions: list[Region]) -> None:
    pieces = [IndexedPiece(0, (f"a#{number}",), region) for number, region in enumerate(regions)]
    index = ShardedIndex("ab12", [PartVersion("w.part-0", 7, 2)], {"a": IndexedLeaf("int8", (3, 3), pieces)})
    with pytest.raises(CorruptDataError, match=r"pieces of 'a' that have each element of int8\[3, 3\] once"):
        decode_index(index.encode(), {}, store="w")


@pytest.mark.parametrize("other", [make_leaf(*ROWS, dtype="int8"), make_leaf(make_whole((3, 3)), is_sharded=False)])
def test_pieces_when_ranks_differ_in_a_leaf_then_refused_by_key(other: RankLeaf) -> None:
    with pytest.raises(SpecMismatchError, match=r"key 'a': expected a DTensor of float32\[3, 3\].* at rank 1"):
        assign_pieces([{"a": make_leaf(*ROWS)}, {"a": other}], store="w")


def test_plain_version_when_indexed_then_each_leaf_is_one_piece() -> None:
    index = index_plain("w", 4, {("a", "b"): ("int8", (2, 2)), ("empty",): ("int8", (0, 2))}, {"lr": 1})
    assert index.parts == [PartVersion("w", 4, 2)]
    assert index.leaves["a.b"].pieces == [IndexedPiece(0, ("a", "b"), make_whole((2, 2)))]
    assert index.leaves["empty"].pieces == []
    assert index.values == {"lr": 1}
    with pytest.raises(NotSupportedError, match=r"version 4 of weights 'w'.* the name 'a\.b'"):
        index_plain("w", 4, {("a", "b"): ("int8", (2,)), ("a.b",): ("int8", (2,))}, {})
