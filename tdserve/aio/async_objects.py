"""Objects whose methods are coroutines, made from those of a synchronous class."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial, update_wrapper
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar, Concatenate, ParamSpec, TypeVar, cast

from tensordict import TensorDictBase

from tdserve.aio.async_calls import WRAPPERS, Calls, OpeningCall
from tdserve.base.errors import DeadlineExceededError, InvalidRequestError, TDServeError
from tdserve.client.session.calls.awaitable_future import AwaitableFuture

if TYPE_CHECKING:
    from typing_extensions import Self

BLOCK = 64
"""Rows or keys that an iteration over a handle fetches from its thread at once."""

_END = object()
_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")
_Opened = TypeVar("_Opened", bound="AsyncObject")


def make_coroutine(
    method: Callable[Concatenate[Any, _Parameters], _Result],
) -> Callable[Concatenate[Any, _Parameters], Coroutine[Any, Any, _Result]]:
    """Makes a coroutine function of a method, with the same arguments; a ``timeout_s`` covers the wait for a thread."""
    position = _find_timeout(method)

    async def call(self: Any, /, *args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        def call_method(*args: Any, **kwargs: Any) -> _Result:
            made: _Result = getattr(self.sync, method.__name__)(*args, **kwargs)
            return made

        waiting = _take_wait_off(call_method, args, kwargs, position, ends=method.__name__ == "close")
        result: _Result = await self._run(waiting, method.__name__)
        return result

    update_wrapper(call, method)
    return call


def make_handle_coroutine(
    method: Callable[Concatenate[Any, _Parameters], Any], kind: type[_Opened]
) -> Callable[Concatenate[Any, _Parameters], Coroutine[Any, Any, _Opened]]:
    """Makes a coroutine function of a method whose result is wrapped.

    Args:
        kind: In what; for type checkers, since ``Calls.wrap`` goes by the result.
    """
    return make_coroutine(method)


def make_opening(
    method: Callable[Concatenate[Any, _Parameters], Any], kind: type[_Opened]
) -> Callable[Concatenate[Any, _Parameters], OpeningCall[_Opened]]:
    """Makes a function that returns the ``OpeningCall`` of a method's result.

    Arguments as in ``make_handle_coroutine``.
    """
    return open_result(make_coroutine(method), kind)


def open_result(
    call: Callable[Concatenate[Any, _Parameters], Coroutine[Any, Any, Any]], kind: type[_Opened]
) -> Callable[Concatenate[Any, _Parameters], OpeningCall[_Opened]]:
    """Makes a function that returns the ``OpeningCall`` of a coroutine function's result.

    Args:
        kind: As in ``make_handle_coroutine``.
    """

    def begin(self: Any, /, *args: _Parameters.args, **kwargs: _Parameters.kwargs) -> OpeningCall[_Opened]:
        return OpeningCall(call(self, *args, **kwargs))

    update_wrapper(begin, call)
    return begin


def make_function_coroutine(
    function: Callable[Concatenate[Any, _Parameters], _Result], *, gives_up: bool = True
) -> Callable[Concatenate[Any, _Parameters], Coroutine[Any, Any, _Result]]:
    """Makes a coroutine function of a function whose first argument is a client; as ``make_coroutine``.

    Args:
        gives_up: As the attribute of ``AsyncObject``.
    """

    position = _find_timeout(function)

    async def call(client: Any, /, *args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        if not isinstance(client, AsyncObject):
            reason = f"a {type(client).__name__} is not of tdserve.aio; give what tdserve.aio.connect returns"
            raise InvalidRequestError(argument="client", reason=reason)
        waiting = _take_wait_off(partial(function, client.sync), args, kwargs, position)
        result: _Result = await client._calls.run(waiting, gives_up=gives_up)
        return result

    update_wrapper(call, function)
    return call


def _find_timeout(function: Callable[..., Any]) -> int | None:
    """Returns the position of ``timeout_s`` among the arguments behind the first; None if it is not among them."""
    try:
        parameters = list(inspect.signature(function).parameters.values())[1:]
    except (TypeError, ValueError):  # no function, or one in C
        return None
    positional = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    return positional.index("timeout_s") if "timeout_s" in positional else None


def _take_wait_off(
    call: Callable[..., _Result],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    position: int | None,
    *,
    ends: bool = False,
) -> Callable[[], _Result]:
    """Returns a call that is made later, in a thread, with what is left then of its ``timeout_s``.

    Args:
        position: Its position among ``args``.
        ends: Whether the call ends something: then it is made although nothing is left.

    Raises (from the call):
        DeadlineExceededError: Nothing was left: 0 would mean something else.
    """
    begun_s = time.monotonic()

    def call_in_thread() -> _Result:
        given, named = list(args), dict(kwargs)
        is_positional = position is not None and position < len(given)
        holder, key = cast("tuple[Any, Any]", (given, position) if is_positional else (named, "timeout_s"))
        timeout_s = holder[key] if is_positional else named.get("timeout_s")
        if isinstance(timeout_s, (int, float)) and timeout_s > 0:
            left_s = timeout_s - (time.monotonic() - begun_s)
            if left_s <= 0 and not ends:
                what = "a free thread: earlier calls of this client are under way"
                raise DeadlineExceededError(what=what, timeout_s=timeout_s)
            holder[key] = max(left_s, 0.0)
        return call(*given, **named)

    return call_in_thread


class AsyncObject:
    """An object whose calls are coroutines: those of a synchronous object, with the same names and arguments.

    Properties stay properties, unless they ask the server: then they are coroutines without arguments. What Python has
    no asynchronous form of (``len``, ``in``, assignment and deletion by subscript) has a method with a name:
    ``info``, ``describe``, ``set``, ``put``, ``delete``. ``sync`` has everything, for other threads.

    Args:
        wrapped: The synchronous object.
        calls: The threads of its client.

    Attributes:
        sync: The synchronous object.
        has_end: Whether it is closed, or its rows given back, if the task that made it is cancelled before it gets it.
        gives_up: Whether its calls give up what they wait for if their task is cancelled. Otherwise they continue.
    """

    has_end: ClassVar[bool] = False
    gives_up: ClassVar[bool] = True

    def __init__(self, wrapped: Any, calls: Calls) -> None:
        self.sync = wrapped
        self._calls = calls

    def __init_subclass__(
        cls, of: type | None = None, attributes: Sequence[str] = (), asks: Sequence[str] = (), hides: type = object
    ) -> None:
        """Adds what is not written down.

        Args:
            of: The class of what it wraps; None for a class that others derive from.
            attributes: Attributes of its instances.
            asks: Properties that ask the server.
            hides: A base of it whose names are left out, unless they are written down or ``attributes``.
        """
        super().__init_subclass__()
        if of is None:
            return
        WRAPPERS[of] = cls
        for name in dir(of):
            if name.startswith("_") or hasattr(cls, name) or name in dir(hides):
                continue
            found = inspect.getattr_static(of, name)
            if not isinstance(found, property):
                setattr(cls, name, make_coroutine(getattr(of, name)))
            elif name in asks:
                setattr(cls, name, _make_question(name, found.__doc__))
            else:
                setattr(cls, name, _make_property(name, found.__doc__))
        for name in attributes:
            setattr(cls, name, _make_property(name, None))

    if TYPE_CHECKING:  # for the names that are not written down

        def __getattr__(self, name: str) -> Any: ...

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.sync!r}>"

    async def _run(self, call: Callable[[], Any], name: str = "") -> Any:
        return await self._calls.run(call, is_end=name == "close", gives_up=self.gives_up)

    async def __aenter__(self) -> Any:
        entered = self.sync.__enter__()  # here: it sends no request, and a task cannot be cancelled in the middle of it
        return self if entered is self.sync else entered

    async def __aexit__(self, *error: object) -> Any:
        return await self._calls.run(partial(self.sync.__exit__, *error), is_end=True)


def _make_property(name: str, doc: str | None) -> property:
    def get(self: AsyncObject) -> Any:
        return getattr(self.sync, name)

    def put(self: AsyncObject, value: Any) -> None:
        setattr(self.sync, name, value)

    return property(get, put, doc=doc)


def _make_question(name: str, doc: str | None) -> Callable[[AsyncObject], Coroutine[Any, Any, Any]]:
    async def ask(self: AsyncObject) -> Any:
        return await self._run(lambda: getattr(self.sync, name))

    ask.__name__, ask.__doc__ = name, doc
    return ask


class AsyncSequence(AsyncObject):
    """One that is read by subscript, ``await handle[3:5]``, and by ``async for``."""

    async def __getitem__(self, index: Any) -> Any:
        return await self._run(lambda: self.sync[index])

    async def __aiter__(self) -> AsyncIterator[Any]:
        found = await self._calls.run(lambda: iter(self.sync))
        while block := await self._calls.run(lambda: list(islice(found, BLOCK))):
            for each in block:
                yield each


class AsyncIterating(AsyncObject):
    """An iterator; one task iterates. A step that is cancelled is not lost: the next one brings what it brings."""

    _step: AwaitableFuture[Any] | None = None

    def __aiter__(self) -> Self:
        return self

    async def _take_step(self, step: Callable[[], Any]) -> Any:
        """Returns what the step under way brings; if there is none, it is begun."""
        if self._step is None:
            self._step = self._calls.start(step)
        try:
            found = await self._step
        except asyncio.CancelledError:
            raise
        except BaseException:
            self._step = None
            raise
        self._step = None
        return found


class AsyncSteps(AsyncIterating):
    """An iterator each of whose steps is a call, and which has an end."""

    has_end = True

    async def __anext__(self) -> Any:
        found = await self._take_step(lambda: next(self.sync, _END))
        if found is _END:
            raise StopAsyncIteration
        return found

    async def __aexit__(self, *error: object) -> Any:
        step = self._step
        if step is None or step.cancel():
            return await super().__aexit__(*error)
        await self._calls.run(self.sync.close, is_end=True)  # what the step brings was not seen: it is given back
        with suppress(TDServeError):
            await step
        return None


class AsyncTensorDictCalls(AsyncSequence):
    """The methods of tensordict that a handle or view answers although it does not define them."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(TensorDictBase, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

        def perform(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
            found = getattr(self.sync, name)
            return found(*args, **kwargs) if callable(found) else found

        async def call(*args: Any, **kwargs: Any) -> Any:
            return await self._run(partial(perform, args, kwargs))

        return call
