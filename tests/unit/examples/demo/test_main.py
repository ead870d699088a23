from __future__ import annotations

from pathlib import Path

import pytest

from tdserve.base.errors import InvalidRequestError, NotSupportedError
from tdserve.examples.demo.demo_options import DemoOptions
from tdserve.examples.demo.demo_run import run


def test_figures_that_cannot_be_written_are_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidRequestError) as caught:
        run(DemoOptions(out=tmp_path / "file" / "folder"))
    assert caught.value.argument == "out"


def test_an_environment_that_cannot_be_learned_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(NotSupportedError):
        run(DemoOptions(env="Pendulum-v1", out=tmp_path / "out"))
    assert not (tmp_path / "out").exists()
