"""Handles work in every process: they are pickled by address, and use a client of the child's own after a fork."""

from __future__ import annotations

import atexit
import itertools
import os
import weakref
from collections.abc import Callable
from multiprocessing.util import Finalize
from threading import Lock
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, overload

from tdserve.client.session.recipe import Recipe
from tdserve.client.session.session_client import SessionClient

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
        """Starts again in a forked child."""
        client = self.__dict__.get("_client")
        if client is not None:
            self._recipe = client.recipe
        _inherited.append([self.__dict__.pop(name, None) for name in self._of_process])


_clients: dict[Recipe, SessionClient] = {}
_clients_lock = Lock()
_numbers = itertools.count()
_living: weakref.WeakValueDictionary[int, ByAddress] = weakref.WeakValueDictionary()
"""Identifies the objects by ``id``, since objects that compare like a tensordict have no hash."""

_inherited: list[Any] = []
"""What belongs to the parent of a forked child, kept alive: its end would close what the parent uses."""


def get_process_client(recipe: Recipe) -> SessionClient:
    """Returns this process's client of an address and settings; makes it when first asked, and closes it at exit."""
    with _clients_lock:
        found = _clients.get(recipe)
        if found is None or found.is_closed:
            if not _clients:
                # A process forked by multiprocessing exits without atexit, and a spawned one may too.
                Finalize(None, _close_clients, exitpriority=0)
            found = _clients[recipe] = recipe.make()
        return found


def _close_clients() -> None:
    with _clients_lock:
        closing = list(_clients.values())
    for client in closing:
        client.close()


def _begin_all_anew() -> None:
    global _clients, _clients_lock
    _inherited.append(_clients)
    _clients, _clients_lock = {}, Lock()
    for each in list(_living.values()):
        each._begin_anew()


os.register_at_fork(after_in_child=_begin_all_anew)
# Registered before the users of these clients register theirs, so that those run first.
atexit.register(_close_clients)
