from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tdserve.base.errors import InvalidRequestError
from tdserve.examples.demo.demo_options import DemoOptions, parse


def test_arguments_are_parsed_to_the_same_run() -> None:
    asked = DemoOptions(seed=7, max_seconds=12.5, env="Acrobot-v1", transport="gloo")
    child = parse(asked.arguments(address="127.0.0.1:4444", index=1))
    assert child == DemoOptions(
        seed=7, max_seconds=12.5, env="Acrobot-v1", transport="gloo", role="actor", address="127.0.0.1:4444", index=1
    )


@pytest.mark.parametrize(
    ("wrong", "argument"),
    [
        ({"seed": -1}, "seed"),
        ({"max_seconds": 0.0}, "max_seconds"),
        ({"max_seconds": float("nan")}, "max_seconds"),
        ({"num_actors": 0}, "num_actors"),
        ({"role": "actor"}, "role"),
        ({"address": "127.0.0.1:1"}, "role"),
    ],
)
def test_options_that_no_run_can_have_are_refused(wrong: dict[str, Any], argument: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        DemoOptions(**wrong)
    assert caught.value.argument == argument


def test_figures_go_into_the_folder_unless_named() -> None:
    options = DemoOptions(out=Path("there"), json_path=Path("elsewhere.json"))
    assert options.figures_path == Path("elsewhere.json")
    assert options.curve_path == Path("there/learning-curve.png")


def test_options_when_shown_then_the_token_is_not() -> None:
    assert "s3cret" not in repr(DemoOptions(role="actor", address="a:1", token="s3cret"))
