from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict, lazy_stack

from tdserve.base.errors import InvalidRequestError, NotSupportedError, WrongStateError
from tdserve.client.tensordicts.memmap_arguments import (
    check_device,
    check_mode,
    check_no_archive,
    check_no_files,
    check_part,
    check_sizes,
    check_subpath,
    has_parameters,
    split_name,
)
from tdserve.structure.captures.capture import capture
from tests.errors import raises

TD = TensorDict({"x": torch.zeros(2), "n": {"x": torch.zeros(2), "t": "text"}}, [2])
SPEC = capture(TD).spec
RAGGED = capture(
    TensorDict({"j": torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)], layout=torch.jagged)}, [2])
).spec


@pytest.mark.parametrize(
    ("subpath", "path"),
    [
        (None, ()),
        ("", ()),
        ("n", ("n",)),
        ("/a//b/", ("a", "b")),
        (("a", "b"), ("a", "b")),
        (("a", ("b", ("c",))), ("a", "b", "c")),
        (("a/b",), ("a/b",)),
    ],
)
def test_subpath_when_of_any_form_then_a_path(subpath: Any, path: tuple[str, ...]) -> None:
    assert check_subpath(subpath) == path


@pytest.mark.parametrize(
    ("name", "subpath", "found"),
    [
        ("s", None, ("s", ())),
        ("s", "a/b", ("s", ("a", "b"))),
        ("s/a", None, ("s", ("a",))),
        ("s/a/", ("b", "c"), ("s", ("a", "b", "c"))),
        ("/s", None, ("/s", ())),
        ("s/", None, ("s/", ())),
        (5, None, (5, ())),
    ],
)
def test_name_when_split_then_a_store_and_a_part(name: Any, subpath: Any, found: tuple[Any, ...]) -> None:
    assert split_name(name, subpath) == found


@pytest.mark.parametrize(
    ("batch_size", "sizes"), [((), ()), (3, (3,)), (np.int64(3), (3,)), ([np.int32(3), 0], (3, 0))], ids=str
)
def test_sizes_when_natural_numbers_then_a_tuple(batch_size: Any, sizes: tuple[int, ...]) -> None:
    assert check_sizes(batch_size) == sizes


@pytest.mark.parametrize("batch_size", [-1, 2.0, True, "3", None, [3, -1], [[3]]], ids=repr)
def test_sizes_when_one_is_no_natural_number_then_refused(batch_size: Any) -> None:
    with raises(InvalidRequestError, argument="batch_size"):
        check_sizes(batch_size)


@pytest.mark.parametrize("subpath", [(), 3, ("a", 3), ["a"], ((),)])
def test_subpath_when_it_names_nothing_then_refused(subpath: Any) -> None:
    with raises(InvalidRequestError, argument="subpath"):
        check_subpath(subpath)


def test_part_when_a_node_or_a_value_then_allowed() -> None:
    for path in ((), ("n",), ("n", "t")):
        check_part(SPEC, path, store="q")


@pytest.mark.parametrize(
    ("spec", "path", "said"), [(SPEC, ("x",), "tensor"), (SPEC, ("n", "no"), "no key"), (RAGGED, ("j",), "tensor")]
)
def test_part_when_a_tensor_or_nothing_then_a_value_error_that_names_it(
    spec: Any, path: tuple[str, ...], said: str
) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        check_part(spec, path, store="q")
    assert isinstance(caught.value, InvalidRequestError)
    assert path[-1] in str(caught.value)


@pytest.mark.parametrize(("mode", "device"), [("w", None), ("", None), ("r+", "cuda"), (1, None)])
def test_mode_when_none_or_contradicted_then_refused(mode: Any, device: Any) -> None:
    with raises(InvalidRequestError, argument="mode"):
        check_mode(mode, device)


@pytest.mark.parametrize(("mode", "device"), [(None, "cuda"), ("r", "cuda"), ("r+", "cpu"), ("r+", None)])
def test_mode_when_possible_then_let_through(mode: Any, device: Any) -> None:
    check_mode(mode, device)


def test_device_when_out_has_one_then_it_is_that_or_refused() -> None:
    meta, none = TensorDict({}, [], device="meta"), TensorDict({}, [])
    assert (check_device(none, None), check_device(none, "cpu")) == (None, "cpu")
    assert check_device(meta, None) == check_device(meta, "meta") == torch.device("meta")
    for device in ("cpu", 0):
        with pytest.raises(InvalidRequestError, match="out is on meta"):
            check_device(meta, device)


@pytest.mark.parametrize(("archive", "compression"), [(True, None), (None, "deflate"), (False, 8)])
def test_archive_when_asked_for_then_refused_with_what_to_do(archive: Any, compression: Any) -> None:
    with pytest.raises(NotSupportedError, match="save"):
        check_no_archive(archive, compression)


def test_archive_when_not_asked_for_then_let_through() -> None:
    check_no_archive(None, None)
    check_no_archive(False, None)


@pytest.mark.parametrize("kind", ["nested", "stack"])
def test_files_when_a_leaf_has_one_then_refused_by_name(tmp_path: Path, kind: str) -> None:
    mapped = TensorDict({"x": torch.zeros(2)}, [2]).memmap(str(tmp_path))
    td = TensorDict({"n": mapped}, [2]) if kind == "nested" else lazy_stack([TD.select("x").to("cpu"), mapped])
    with pytest.raises(WrongStateError, match=r"x.*memmap.*copy_existing=True"):
        check_no_files(td)


def test_files_when_memory_is_anonymous_then_let_through() -> None:
    check_no_files(TD.clone().memmap())


def test_parameters_when_anywhere_then_found() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    assert has_parameters(TensorDict({"n": {"w": weight}}, []))
    assert has_parameters(lazy_stack([TensorDict({"w": weight}, []), TensorDict({"w": torch.zeros(3)}, [])]))
    assert not has_parameters(TD)
