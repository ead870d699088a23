"""Calls of a cluster's client about a store that one server has: they are made there."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Concatenate, ParamSpec, TypeVar, cast

from tdserve.base.deadline import Deadline
from tdserve.base.errors import StoreExistsError, StoreNotFoundError, WrongStateError
from tdserve.client.client import Client
from tdserve.client.cluster.moves.cluster_moves import ClusterMoves
from tdserve.client.cluster.moves.cut_short_moves import finish_cut_short
from tdserve.client.cluster.servers.directory import Place
from tdserve.client.session.calls.call_deadline import within
from tdserve.rules.catalog import IS_COMING
from tdserve.rules.placement import check_no_part

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


_TABLES = ("create_replay", "create_queue", "create_kv")
CREATING = frozenset(("init_remote", "memmap", "memmap_", "memmap_like", "adopt", *_TABLES))
"""Calls that make stores. While the owner of a name does not answer, they raise at once."""

NAMING = CREATING | {"publish"}
"""Calls that may make stores; a store that is named like a part of another would be taken for one."""


def at_home(
    method: Callable[Concatenate[Client, _Parameters], _Result],
) -> Callable[Concatenate[ClusterMoves, _Parameters], _Result]:
    """Makes the method that calls the client of the server that has the store of its argument ``name``."""
    parameters, call_name = list(signature(method).parameters), method.__name__
    position = parameters.index("name") - 1
    is_timed = "timeout_s" in parameters and call_name != "subscribe"  # whose timeout is that of each wait

    @wraps(method)
    def call(self: ClusterMoves, *args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        name = args[position] if len(args) > position else kwargs.get("name")
        if not isinstance(name, str):  # the client of any server refuses it
            return getattr(self.members.get(0), call_name)(*args, **kwargs)  # type: ignore[no-any-return]
        if call_name in NAMING:
            check_no_part(name)
        store = name.partition("/")[0]  # load_memmap takes the path of a nested tensordict
        deadline = self.cluster.make_deadline(kwargs.get("timeout_s"))  # type: ignore[arg-type]
        if is_timed:
            kwargs.pop("timeout_s", None)
        place, may_create = _find_place(self, store, call_name, deadline), call_name in NAMING

        def call_client(client: Client) -> _Result:
            return getattr(client, call_name)(*args, **kwargs)  # type: ignore[no-any-return]

        if call_name in CREATING:
            with within(deadline):
                return _create(self, store, place.server, call_client)
        if is_timed and deadline.expired:
            self.members.raise_if_lost(place.server, f"which may have {store!r}")
        with within(deadline):
            if may_create:
                self.directory.check_creation(store)
            try:
                return self.directory.call_there(store, place, call_client, deadline)[0]
            except StoreNotFoundError:
                if (again := self.directory.find_again(store, deadline)) is None:
                    raise
                return self.directory.call_there(store, again, call_client, deadline)[0]

    return cast("Callable[Concatenate[ClusterMoves, _Parameters], _Result]", call)


def _create(moves: ClusterMoves, store: str, server: int, create: Callable[[Client], _Result]) -> _Result:
    """Creates a store at the server that decides about its name. If a move that was cut short has brought one there,
    that is shown or removed first, as the other servers know of it."""
    try:
        with moves.directory.begin_creation(store, server):
            return create(moves.members.get(server))
    except StoreExistsError as error:
        if error.reason != IS_COMING:
            raise
        finish_cut_short(moves.members, store, [server])
    with moves.directory.begin_creation(store, server):
        return create(moves.members.get(server))


def _find_place(moves: ClusterMoves, store: str, call_name: str, deadline: Deadline) -> Place:
    """Returns where a call is made. Raises WrongStateError if several servers share the store."""
    directory, may_create = moves.directory, call_name in NAMING
    place = (directory.find_for_creation if may_create else directory.find)(store, deadline)
    if place.placement is not None and not may_create:  # unless it was deleted since
        place = directory.find_now(store, deadline)
    if place.placement is not None and call_name not in CREATING:
        state = f"{store!r} has parts on servers {', '.join(map(str, place.placement.servers))}"
        raise WrongStateError(state=f"{state} (client[{store!r}] reads and writes them)", event=f"{call_name}()")
    return place
