from __future__ import annotations

from typing import Any

import pytest

from tdserve.base.errors import InvalidRequestError
from tdserve.client.tables.draws.share import Share, parse_share


def test_parse_when_no_rank_is_given_then_none() -> None:
    assert parse_share(None, None, None, None) is None


@pytest.mark.parametrize(
    ("arguments", "argument"),
    [
        ((0, None, None, None), "rank"),
        ((None, 2, None, None), "world_size"),
        ((None, None, 3, None), "step"),
        ((None, None, None, ("n",)), "balance"),
        ((2, 2, None, None), "rank"),
        ((-1, 2, None, None), "rank"),
        ((0, 0, None, None), "world_size"),
        ((0, 2, -1, None), "step"),
        ((True, 2, 0, None), "rank"),
        ((None, None, None, None, "a"), "run"),
        ((0, 2, 0, None, 1.5), "run"),
        ((0, 2, 0, None, "a" * 201), "run"),
    ],
)
def test_parse_when_invalid_then_refused_by_name(arguments: Any, argument: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        parse_share(*arguments)
    assert raised.value.argument == argument


@pytest.mark.parametrize(("step", "number", "is_named"), [(None, 0, False), (0, 0, True), (7, 7, True)])
def test_parse_when_a_step_is_named_or_not_then_marked_so(step: int | None, number: int, is_named: bool) -> None:
    assert parse_share(1, 2, step, None) == Share(1, 2, number, is_named=is_named)


@pytest.mark.parametrize(
    ("variable", "run", "expected"), [(None, None, ""), ("none", None, ""), ("job", None, "job"), ("job", 7, "7")]
)
def test_parse_when_torchrun_names_the_run_then_it_is_that_unless_another_is_given(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, run: Any, expected: str
) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if variable is not None:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", variable)
    share = parse_share(0, 2, 0, None, run)
    assert share is not None
    assert (share.run, share.make_message().run) == (expected, expected)
