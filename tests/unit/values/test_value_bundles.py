"""Values of one row under several paths are bundled and unbundled."""

from __future__ import annotations

import numpy as np
import pytest

from tdserve.base.errors import RemoteProtocolError
from tdserve.values.value_bundles import SplitColumn, Unbundled, bundle, encode_bundles
from tdserve.values.value_columns import measure_sizes

TEXTS = [b"one", b"", b"three"]
NUMBERS = [b"1", b"22", b"333"]


def test_bundle_when_of_columns_in_pieces_then_is_what_bundles_of_gives() -> None:
    heads, bodies = [b"a", b"b", b"c"], [memoryview(b"AA"), memoryview(b""), memoryview(b"C")]
    whole = [head + bytes(body) for head, body in zip(heads, bodies, strict=True)]
    sizes, parts = bundle(
        [SplitColumn(measure_sizes(TEXTS), [TEXTS]), SplitColumn(measure_sizes(whole), [heads, bodies])]
    )
    found = encode_bundles([TEXTS, whole])
    assert b"".join(parts) == b"".join(found)
    assert sizes.tolist() == [len(each) for each in found]
    assert found[0] == np.array([3, 3], "<u4").tobytes() + b"one" + b"aAA"


def test_bundle_when_of_several_columns_then_their_values_are_not_copied() -> None:
    columns = [TEXTS, NUMBERS, TEXTS]
    _, parts = bundle([SplitColumn(measure_sizes(values), [values]) for values in columns])
    assert all(parts[4 * row + 2] is NUMBERS[row] for row in range(3))
    assert b"".join(parts) == b"".join(encode_bundles(columns))
    assert bundle([SplitColumn(measure_sizes([]), [[]])])[1] == []


@pytest.mark.parametrize("kind", [bytes, memoryview])
def test_unbundle_when_asked_for_paths_then_gives_their_values(kind: type) -> None:
    found = Unbundled([kind(each) for each in encode_bundles([TEXTS, NUMBERS])], 2)
    assert [bytes(value or b"?") for value in found.iter_column(1)] == NUMBERS
    assert [bytes(value) for value in found.iter_column(0) if value is not None] == TEXTS


def test_unbundle_when_rows_have_none_then_neither_have_their_values() -> None:
    first, _, last = encode_bundles([TEXTS, NUMBERS])
    found = Unbundled([None, first, None, last], 2)
    assert list(found.iter_column(0)) == [None, b"one", None, b"three"]
    assert list(Unbundled([None], 2).iter_column(0)) == [None]
    assert list(Unbundled([], 2).iter_column(1)) == []


@pytest.mark.parametrize("content", [b"", b"1234567", b"\1\0\0\0\1\0\0\0a", b"\1\0\0\0\1\0\0\0abc", b"\xff" * 8])
def test_unbundle_when_bytes_are_no_bundle_then_is_refused(content: bytes) -> None:
    whole = encode_bundles([TEXTS, NUMBERS])
    with pytest.raises(RemoteProtocolError, match="bundles"):
        Unbundled([whole[0], content], 2)


COLUMNS = [TEXTS, [b"h0" + b"big" * 9, b"h1", b"h2x"], NUMBERS, [b"", b"y", b""]]


@pytest.mark.parametrize("kind", [bytes, memoryview])
@pytest.mark.parametrize("wanted", [(0, 1, 2, 3), (0,), (1,), (0, 2), (2, 3), (1, 2), (3, 0), ()])
@pytest.mark.parametrize("head_nbytes", [None, 0, 2, 3])
def test_columns_when_copied_then_the_values_of_each_path(
    kind: type, wanted: tuple[int, ...], head_nbytes: int | None
) -> None:
    unbundled = Unbundled([kind(each) for each in encode_bundles(COLUMNS)], 4)
    found = unbundled.join_columns({number: head_nbytes if number == 1 else None for number in wanted})
    assert {number: list(values) for number, values in found.items()} == {number: COLUMNS[number] for number in wanted}
    if 1 in wanted and head_nbytes is not None:
        has_heads = head_nbytes == 2  # not all have three bytes
        assert found[1].heads == (b"h0h1h2" if has_heads else b"")
        assert isinstance(found[1].content, bytearray)


def test_columns_when_side_by_side_then_share_a_buffer_and_else_not() -> None:
    found = Unbundled(encode_bundles(COLUMNS), 4).join_columns({0: None, 1: 2, 2: None, 3: None})
    assert found[2].content is found[3].content
    assert found[1].content is not found[0].content is not found[2].content
    assert len(found[0].content) == len(b"".join(TEXTS)) + 3 * 2  # with the heads of what lies behind


def test_columns_when_there_are_no_rows_then_no_values() -> None:
    found = Unbundled([], 2).join_columns({0: None, 1: 8})
    assert {number: list(values) for number, values in found.items()} == {0: [], 1: []}


def test_joined_when_of_several_columns_then_one_after_the_other() -> None:
    first, second = SplitColumn(measure_sizes(TEXTS), [TEXTS]), SplitColumn(measure_sizes(NUMBERS), [NUMBERS])
    both = SplitColumn.join([first, second])
    assert both.sizes.tolist() == [3, 0, 5, 1, 2, 3]
    assert b"".join(both.get_parts()) == b"".join(TEXTS + NUMBERS)
