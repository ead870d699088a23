"""Handles work in every process: they are pickled by address, and use a client of the child's own after a fork."""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, overload

from tdserve.client.session.calls import Recipe, SessionClient
from tdserve.client.session.process_clients import get_process_client

_Value = TypeVar("_Value")
_Self = TypeVar("_Self", bound="ByAddress")


class OfProcess(Generic[_Value]):
    """An attribute that each process makes for itself when it is first read.

    Once made, it costs no more to read than any other attribute.
    """

    def __init__(self, make: Callable[[Any], _Value]) -> None:
        self._make = make
        self.__doc__ = make.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> OfProcess[_Value]: ...

    @overload
    def __get__(self, instance: object, owner: type) -> _Value: ...

    def __get__(self, instance: Any, owner: type) -> OfProcess[_Value] | _Value:
        if instance is None:
            return self
        made: _Value = instance.__dict__.setdefault(self._name, self._make(instance))
        return made

    if TYPE_CHECKING:  # at run time it would hide __get__

        def __set__(self, instance: Any, value: _Value) -> None: ...


class ByAddress:
    """An object that works over ``self._client`` in any process.

    A pickled one opens a client with the same address and settings when it is first used. The process shares that
    client and closes it at exit. A forked child does the same. A copy shares the client of its original.
    """

    _recipe: Recipe
    _of_process: ClassVar[tuple[str, ...]] = ("_client",)

    def __new__(cls: type[_Self], *_: Any, **__: Any) -> _Self:  # noqa: PYI019 (typing.Self is 3.11)
        made = super().__new__(cls)
        _living[next(_numbers)] = made
        return made

    @OfProcess
    def _client(self) -> SessionClient:
        return get_process_client(self._recipe)

    def __getstate__(self) -> dict[str, Any]:
        kept = {name: value for name, value in self.__dict__.items() if name not in self._of_process}
        return {**kept, "_recipe": self.__dict__["_client"].recipe} if "_client" in self.__dict__ else kept

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __copy__(self: _Self) -> _Self:  # noqa: PYI019
        copied = type(self).__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    def _begin_anew(self) -> None:
        """Starts anew in a forked child.

        Keeps the old objects alive, since their end would close what belongs to the parent.
        """
        client = self.__dict__.get("_client")
        if client is not None:
            self._recipe = client.recipe
        _inherited.append([self.__dict__.pop(name, None) for name in self._of_process])


_numbers = itertools.count()
_living: weakref.WeakValueDictionary[int, ByAddress] = weakref.WeakValueDictionary()
"""Identifies the objects by ``id``, since objects that compare like a tensordict have no hash."""

_inherited: list[Any] = []


def _begin_all_anew() -> None:
    for each in list(_living.values()):
        each._begin_anew()


os.register_at_fork(after_in_child=_begin_all_anew)
