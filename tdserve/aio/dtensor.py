"""The calls of ``tdserve.dtensor`` as coroutines, with the same names and arguments, for a client of ``tdserve.aio``.

>>> from tdserve.aio import dtensor
>>> async for weights in dtensor.subscribe(client, "policy", into=engine): ...

A module of its own, since it imports DTensors.
"""

from __future__ import annotations

from tdserve import dtensor as sync
from tdserve.aio.async_handles import AsyncSubscription
from tdserve.aio.async_objects import make_function_coroutine, open_result

__all__ = ["delete", "latest", "publish", "subscribe", "version"]

publish = make_function_coroutine(sync.publish, gives_up=False)  # other ranks wait for it
latest = make_function_coroutine(sync.latest)
version = make_function_coroutine(sync.version)
delete = make_function_coroutine(sync.delete)
subscribe = open_result(make_function_coroutine(sync.subscribe), AsyncSubscription)
