"""The base of all errors: fields, a message made of them, a gRPC code, and what pickling needs."""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar

Field = str | int | float | bool | None
"""What an error's field may hold, so that every error crosses the wire without pickle."""

_Error = TypeVar("_Error", bound="TDServeError")


class TDServeError(Exception):
    """Base of every exception that tdserve raises on purpose; never raised itself.

    Attributes:
        code: gRPC status name of this class.
        retryable: Whether repeating the same call may succeed.
        fields: The offending values, by name; also readable as attributes.
        request_id: Id of the request that a server has answered so: its log has the same id. "" for any other error.
        shards_done: Shards that have done what a call on a shared store asked of them, although others have failed;
            () for any other error, also where it is unknown, as after DeadlineExceededError. The text says what it was.
        values: What a ``pop`` had read before it failed, which may be deleted; or the rows that a consumer's ``sample``
            of a shared table had acknowledged, which it gets nowhere else. None for any other error. It is in this
            process only: a pickled error does not have it.
    """

    code: ClassVar[str] = "INTERNAL"
    retryable: ClassVar[bool] = False
    template: ClassVar[str] = "{reason}"
    defaults: ClassVar[dict[str, Field]] = {"reason": ""}
    values: Any = None

    def __init__(self, **fields: Field) -> None:
        unknown = fields.keys() - self.defaults.keys()
        if unknown:
            raise TypeError(f"{type(self).__name__} has no field {sorted(unknown)}")
        self.fields: dict[str, Field] = {**self.defaults, **fields}
        self.request_id = ""
        self.shards_done: tuple[int, ...] = ()
        super().__init__(self._text)

    @property
    def _text(self) -> str:
        """The message, with what a call that has several steps has done in others (the field ``elsewhere``)."""
        elsewhere = self.fields.get("elsewhere")
        return self._make_message() + (f"; {elsewhere}" if elsewhere else "")

    def _make_message(self) -> str:
        return self.template.format(**self.fields)

    def __getattr__(self, name: str) -> Any:
        fields: dict[str, Field] = self.__dict__.get("fields", {})
        if name in fields:
            return fields[name]
        raise AttributeError(name)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.fields, self.request_id, self.shards_done))

    def with_fields(self: _Error, **changed: Field) -> _Error:  # noqa: PYI019 (typing.Self is 3.11)
        """Returns the same error with other values in some fields."""
        made = _rebuild(type(self), {**self.fields, **changed}, self.request_id, self.shards_done)
        made.values = self.values
        return made

    def note_request(self, request_id: str) -> None:
        """Notes by which id the server's log has the request. The text of an error that is a bug repeats it."""
        self.request_id = request_id
        if request_id and self.code == "INTERNAL":
            self.args = (f"{self._text} (request {request_id} in the server's log)",)


def _rebuild(cls: type[_Error], fields: dict[str, Field], request_id: str, shards_done: tuple[int, ...] = ()) -> _Error:
    error = cls(**fields)
    error.note_request(request_id)
    error.shards_done = shards_done
    return error
