"""Layout and header of version files."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, strategies as st

from tdserve.base.errors import CorruptDataError
from tdserve.store.weights.version_format import (
    check_header_nbytes,
    compute_data_start,
    escape,
    list_leaf_places,
    make_layout,
)
from tdserve.structure.trees.dtypes import ITEMSIZE
from tdserve.structure.trees.tree import Node, Spec, TensorLeaf

LEAVES = st.dictionaries(
    st.text(max_size=4),
    st.builds(TensorLeaf, st.sampled_from(sorted(ITEMSIZE)), st.lists(st.integers(0, 5), max_size=3).map(tuple)),
    max_size=8,
)


def flat(leaves: dict[str, TensorLeaf]) -> Spec:
    return Spec(Node((), None, None, None, tuple(leaves.items())))


@pytest.mark.slow
@given(LEAVES)
def test_layout_when_made_then_is_packed_and_every_leaf_aligned(leaves: dict[str, TensorLeaf]) -> None:
    spec, end = flat(leaves), 0
    for path, offset, nbytes in list_leaf_places(spec):
        assert offset == end
        assert offset % ITEMSIZE[leaves[path[0]].dtype] == 0
        end += nbytes
    assert end == spec.nbytes
    assert {path for path, _, _ in list_leaf_places(spec)} == {path for path, _ in spec.tensors}


@pytest.mark.slow
@given(LEAVES, st.dictionaries(st.text(), st.text()))
def test_header_when_parsed_then_gives_the_metadata_back(
    leaves: dict[str, TensorLeaf], metadata: dict[str, str]
) -> None:
    layout = make_layout(flat(leaves))
    header = layout.encode_header(metadata)
    assert layout.parse(header + b"  ", path="x") == metadata
    found = json.loads(header)
    assert found.pop("__metadata__").keys() >= {"tdserve"}
    assert len(found) == len(leaves)


@pytest.mark.parametrize("key", ["tdserve", "tdserve:", "tdserve:tdserve", "a"])
def test_metadata_when_named_like_ours_then_both_survive(key: str) -> None:
    layout = make_layout(flat({}))
    header = layout.encode_header({key: "theirs"})
    assert layout.parse(header, path="x") == {key: "theirs"}
    assert json.loads(json.loads(header)["__metadata__"]["tdserve"])["format_version"] == 1


@pytest.mark.slow
@given(st.lists(st.lists(st.text(alphabet="a.\\_", max_size=3), min_size=1, max_size=3).map(tuple), unique=True))
def test_names_when_escaped_then_stay_different(paths: list[tuple[str, ...]]) -> None:
    assert len({escape(path) for path in paths}) == len(paths)


def test_name_when_it_is_safetensors_own_then_is_another() -> None:
    assert escape(("__metadata__",)) != "__metadata__"


def test_header_when_of_another_spec_then_is_corrupt() -> None:
    header = make_layout(flat({"a": TensorLeaf("int8", (2,))})).encode_header({})
    with pytest.raises(CorruptDataError, match="somewhere"):
        make_layout(flat({"a": TensorLeaf("int8", (3,))})).parse(header, path="somewhere")


@pytest.mark.parametrize("nbytes", [0, 1, 4087, 4089, 8184, 2**63])
def test_header_when_its_length_is_absurd_then_is_corrupt(nbytes: int) -> None:
    check_header_nbytes(4088, 8191, path="x")
    with pytest.raises(CorruptDataError):
        check_header_nbytes(nbytes, 8191, path="x")


def test_data_start_when_header_grows_a_little_then_stays() -> None:
    assert compute_data_start(bytes(100)) == compute_data_start(bytes(600)) == 4096
    assert compute_data_start(bytes(4000)) == 8192
