"""The check of an error's fields fails where it should."""

from __future__ import annotations

import pytest

from tdserve.base.errors import InvalidRequestError, StoreExistsError, StoreNotFoundError, TDServeError
from tests.errors import raises


def test_raises_when_class_and_fields_are_as_expected_then_the_error_is_returned() -> None:
    error = StoreExistsError(name="x", reason="it is")
    for cls in (StoreExistsError, TDServeError):
        with raises(cls, name="x") as caught:
            raise error
        assert caught.value is error


@pytest.mark.parametrize("fields", [{"name": "y"}, {"colour": "x"}])
def test_raises_when_a_field_differs_or_is_unknown_then_the_test_fails(fields: dict[str, str]) -> None:
    with pytest.raises(AssertionError, match=next(iter(fields.values())) if "name" in fields else "colour"):  # noqa: SIM117
        with raises(StoreNotFoundError, **fields):
            raise StoreNotFoundError(name="x")


def test_raises_when_the_class_is_another_then_the_error_passes() -> None:
    with pytest.raises(StoreNotFoundError):  # noqa: SIM117
        with raises(InvalidRequestError):
            raise StoreNotFoundError(name="x")


def test_raises_when_nothing_is_raised_then_the_test_fails() -> None:
    with pytest.raises(pytest.fail.Exception):  # noqa: SIM117
        with raises(TDServeError):
            pass
