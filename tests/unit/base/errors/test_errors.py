"""Every class of errors survives pickling and the wire, and is caught by ``except`` with a standard type."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest

from tdserve.base import errors
from tdserve.base.errors import TDServeError, list_error_classes

CODES = {
    "ABORTED",
    "ALREADY_EXISTS",
    "DATA_LOSS",
    "DEADLINE_EXCEEDED",
    "FAILED_PRECONDITION",
    "INTERNAL",
    "INVALID_ARGUMENT",
    "NOT_FOUND",
    "OUT_OF_RANGE",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "UNAUTHENTICATED",
    "UNAVAILABLE",
    "UNIMPLEMENTED",
}
CLASSES = sorted(list_error_classes().values(), key=lambda cls: cls.__name__)
every_class = pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)


def with_marked_fields(cls: type[TDServeError]) -> TDServeError:
    """An error whose every field has a value that its message must show."""
    return cls(**{name: 7707 + i for i, name in enumerate(cls.defaults)})


@every_class
def test_pickle_when_every_field_is_set_then_type_fields_and_message_return(cls: type[TDServeError]) -> None:
    error = with_marked_fields(cls)
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is cls
    assert back.fields == error.fields
    assert str(back) == str(error)


@every_class
def test_copy_when_copied_deeply_then_fields_return(cls: type[TDServeError]) -> None:
    error = with_marked_fields(cls)
    assert copy.deepcopy(error).fields == error.fields


@every_class
def test_message_when_fields_are_set_then_shows_every_one(cls: type[TDServeError]) -> None:
    error = with_marked_fields(cls)
    hidden = [name for name, value in error.fields.items() if str(value) not in str(error)]
    assert hidden == []


def test_locked_when_a_part_or_all_of_it_is_then_said_so() -> None:
    assert "store 's' is locked at 'k': " in str(errors.LockedError(store="s", key="k"))
    assert "store 's' is locked as a whole: " in str(errors.LockedError(store="s"))


def test_aborted_when_the_transfer_has_no_number_then_none_is_shown() -> None:
    assert str(errors.TransferAbortedError(transfer=7, reason="it ended")) == "transfer 7 was aborted: it ended"
    assert str(errors.TransferAbortedError(reason="it ended")) == "the transfer was aborted: it ended"


@every_class
def test_message_when_no_field_is_given_then_still_renders(cls: type[TDServeError]) -> None:
    assert str(cls()) == cls.template.format(**cls.defaults)


@every_class
def test_message_when_rendered_then_is_a_lower_case_clause(cls: type[TDServeError]) -> None:
    words = cls.template
    assert not words.endswith(".")
    assert not words[0].isupper()


@every_class
def test_fields_when_read_as_attributes_then_have_the_given_values(cls: type[TDServeError]) -> None:
    error = with_marked_fields(cls)
    assert {name: getattr(error, name) for name in cls.defaults} == error.fields


@every_class
def test_fields_when_unknown_then_type_error_names_it(cls: type[TDServeError]) -> None:
    with pytest.raises(TypeError, match="colour"):
        cls(colour="red")


@every_class
def test_code_when_asked_then_is_a_grpc_status_name(cls: type[TDServeError]) -> None:
    assert cls.code in CODES


@every_class
def test_tree_when_listed_then_module_docstring_shows_class_and_fields(cls: type[TDServeError]) -> None:
    lines = [line for line in (errors.__doc__ or "").splitlines() if cls.__name__ in line.split()]
    assert len(lines) == 1
    own = cls.defaults if "defaults" in cls.__dict__ and cls is not TDServeError else {}
    assert all(field in lines[0] for field in own)


def test_protocol_book_when_it_lists_errors_then_classes_codes_and_fields_are_these() -> None:
    book = (Path(__file__).parents[4] / "proto/README.md").read_text().partition("## §7")[2]
    lines = [line.strip("|").split("|") for line in book.splitlines() if line.startswith("| `")]
    rows = [[cell.strip() for cell in line] for line in lines]
    listed = {name.strip("`"): (code, fields.split(", ")) for name, code, fields, _ in rows}
    bases = {base for cls in CLASSES for base in cls.__mro__[1:]}
    raised = {cls.__name__: (cls.code, list(cls.defaults)) for cls in CLASSES if cls not in bases}
    for cls in (
        errors.CapacityError,
        errors.ClosedError,
        errors.ConnectError,
        errors.CorruptDataError,
        errors.DeadlineExceededError,
        errors.InvalidRequestError,
        errors.NotSupportedError,
        errors.SpecMismatchError,
    ):  # they travel, and so do kinds of them
        raised[cls.__name__] = (cls.code, list(cls.defaults))
    assert listed == raised


def test_attribute_when_it_is_no_field_then_attribute_error() -> None:
    assert not hasattr(errors.StoreNotFoundError(name="a"), "colour")


def test_error_classes_when_called_then_has_every_exception_of_the_module() -> None:
    defined = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert set(list_error_classes()) == defined


def test_error_classes_when_another_module_derives_one_then_it_does_not_travel() -> None:
    class PrivateError(errors.NotSupportedError): ...

    assert PrivateError.__name__ not in list_error_classes()


@pytest.mark.parametrize(
    ("cls", "standard"),
    [
        (errors.InvalidSpecError, ValueError),
        (errors.InvalidRequestError, ValueError),
        (errors.SpecMismatchError, ValueError),
        (errors.SpecMismatchError, RuntimeError),
        (errors.StoreNotFoundError, LookupError),
        (errors.KeyNotFoundError, KeyError),
        (errors.SelectionError, IndexError),
        (errors.NotSupportedError, NotImplementedError),
        (errors.DeadlineExceededError, TimeoutError),
        (errors.ConnectError, ConnectionError),
        (errors.PeerLostError, ConnectionError),
    ],
)
def test_standard_type_when_raised_then_catches(cls: type[TDServeError], standard: type[Exception]) -> None:
    with pytest.raises(standard):
        raise cls()


def test_retryable_when_listed_then_is_only_what_may_succeed_unchanged() -> None:
    assert {cls.__name__ for cls in CLASSES if cls.retryable} == {
        "CapacityError",
        "ServerBusyError",
        "ConnectError",
        "DeadlineExceededError",
        "PeerLostError",
        "StoreMovedError",
        "StoreNotCreatedError",
        "TransferAbortedError",
        "TransportError",
    }


def test_key_error_when_shown_then_is_the_message_and_not_its_repr() -> None:
    error = errors.KeyNotFoundError(store="frames", key="obs")
    assert str(error) == "store 'frames' has no key 'obs'; client.keys('frames') lists its keys"


def test_message_when_a_field_holds_braces_then_shows_them_as_they_are() -> None:
    assert "{x}" in str(errors.StoreNotFoundError(name="{x}"))


def test_spec_mismatch_when_it_is_of_the_whole_store_then_no_key_is_named() -> None:
    error = errors.SpecMismatchError(store="s", expected="a", actual="b")
    assert str(error) == "store 's': expected a, got b"


def test_spec_mismatch_when_it_is_of_no_store_then_none_is_named() -> None:
    error = errors.SpecMismatchError(key="k", expected="a", actual="{b}")
    assert str(error) == "key 'k': expected a, got {b}"
