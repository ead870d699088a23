"""tdserve/imports/formats.py: the formats, and their packages."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tdserve.base.errors import InvalidRequestError, NotSupportedError
from tdserve.cli.files import import_rows
from tdserve.imports.formats import FORMATS, open_source
from tdserve.imports.import_source import ImportOptions

PACKAGES = {"hdf5": "h5py", "hf": "datasets", "minari": "minari"}


def test_formats_when_listed_then_those_of_the_command() -> None:
    assert {*FORMATS} == {*import_rows.FORMATS}


@pytest.mark.parametrize("kind", sorted({*FORMATS} & {*PACKAGES}))
def test_format_when_its_package_is_absent_then_error_with_the_pip_command(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, PACKAGES[kind], None)
    with pytest.raises(NotSupportedError, match=rf"{PACKAGES[kind]}.*pip install 'tdserve\[{kind}\]'"):
        open_source(kind, str(tmp_path / "x"), ImportOptions())


def test_file_of_torch_when_two_of_its_names_are_one_key_then_refused_unless_others_are_chosen(tmp_path: Path) -> None:
    path = str(tmp_path / "file.pt")
    torch.save({0: torch.zeros(3), "0": torch.ones(3), "other": torch.ones(3)}, path)
    with pytest.raises(InvalidRequestError, match="2 arrays in it have the key 0"):
        open_source("pt", path, ImportOptions())
    with open_source("pt", path, ImportOptions(keys=[("other",)])) as source:
        assert source.num_rows == 3
