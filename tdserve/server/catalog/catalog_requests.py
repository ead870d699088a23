"""Answers questions about stores: descriptions, key listings, pages of names."""

from __future__ import annotations

from tdserve.base.deadline import Deadline
from tdserve.base.errors import RemoteProtocolError
from tdserve.rules.access.grants import FULL_GRANT, Grant
from tdserve.rules.catalog import MAX_PAGE_SIZE
from tdserve.server.catalog.descriptions import describe, describe_packed
from tdserve.server.catalog.stores import Stores
from tdserve.server.execution import inline_tasks
from tdserve.server.execution.admission_budget import AdmissionBudget
from tdserve.server.kinds.placement_kind import find_forward, is_listed
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.sessions.client_session import ClientSession
from tdserve.v1 import content_pb2, control_pb2


class CatalogRequests:
    """The questions of unary calls, and the same questions of sessions, which wait for nothing.

    Args:
        stores: The server's stores.
        held: Counts the calls that wait.
    """

    def __init__(self, stores: Stores, held: AdmissionBudget) -> None:
        self._stores = stores
        self._held = held

    async def serve(
        self, session: ClientSession, request: int, asked: control_pb2.CatalogRequest
    ) -> control_pb2.Done | None:
        """Answers the question of a session.

        Raises:
            StoreNotFoundError: There is no such store.
        """
        kind, answer = asked.WhichOneof("body"), control_pb2.CatalogAnswer()
        if kind == "describe_store":
            asked.describe_store.timeout_s = 0.0
            answer.describe_store.CopyFrom(await self.describe_store(asked.describe_store))
        elif kind == "list_stores":
            answer.list_stores.CopyFrom(self.list_stores(asked.list_stores, session.caller.grant))
        elif kind == "list_keys":
            answer.list_keys.CopyFrom(await self.list_keys(asked.list_keys))
        else:
            raise RemoteProtocolError(expected="a question about stores", received="an empty message")
        return control_pb2.Done(catalog=answer)

    async def describe_store(self, request: control_pb2.DescribeStoreRequest) -> control_pb2.StoreDescription:
        """Describes a store; waits until it exists.

        Raises:
            ServerBusyError: It does not exist, and too many calls wait already.
            StoreNotFoundError, StoreNotCreatedError: As raised by ``Stores.wait``.
        """
        stores, deadline = self._stores, Deadline.after(request.timeout_s)
        stores.seals.check_here(request.name)
        with self._held.admit_unary(must_wait=request.name not in stores.catalog):
            record = await stores.wait_visible(request.name, deadline)
            if record.packed and request.without_spec:  # else its files may be wanted, whose path is in there
                return describe_packed(stores, record, with_spec=False)
            store = await self._open(request.name, deadline)
        store.catch_up()
        return describe(stores, store, with_spec=not request.without_spec)

    async def _open(self, name: str, deadline: Deadline) -> OpenedStore:
        """Returns a store that exists, opened if need be, which takes a task."""
        if (store := self._stores.find_if_open(name)) is not None:
            return store
        await inline_tasks.ensure_task()
        return await self._stores.wait(name, deadline)

    def list_stores(
        self, request: control_pb2.ListStoresRequest, grant: Grant = FULL_GRANT
    ) -> control_pb2.ListStoresResponse:
        """Returns one page of store names, without those that the grant does not include."""
        catalog = self._stores.catalog
        if request.near:
            near = filter(grant.has_store, catalog.find_names_around(request.near, request.page_size))
            return control_pb2.ListStoresResponse(names=near)
        names, after = self._list_page(request, grant)
        here = [name for name in names if is_listed(catalog.get(name))]
        moved = [name for name in names if find_forward(catalog.get(name))] if request.with_moved else ()
        return control_pb2.ListStoresResponse(names=here, next_page_token=after, moved=moved)

    def _list_page(self, request: control_pb2.ListStoresRequest, grant: Grant) -> tuple[list[str], str]:
        """Returns a page of names and its token, which is no name that the grant does not include either."""
        catalog, after = self._stores.catalog, request.page_token
        if grant.has_all_stores:
            return catalog.list_page(request.prefix, after=after, size=request.page_size)
        size = min(request.page_size or MAX_PAGE_SIZE, MAX_PAGE_SIZE)
        names: list[str] = []
        while len(names) < size:
            page, after = catalog.list_page(request.prefix, after=after)
            names += filter(grant.has_store, page)
            if not after:
                break
        is_last = not after and len(names) <= size
        return names[:size], "" if is_last else names[size - 1]

    async def list_keys(self, request: control_pb2.ListKeysRequest) -> control_pb2.ListKeysResponse:
        """Returns the keys of a store, as ``TensorDict.keys`` lists them. Raises StoreNotFoundError."""
        stores = self._stores
        record = await stores.wait_visible(request.name, Deadline.after(0.0))
        stores.seals.check_here(request.name)
        if record.packed:
            spec = stores.specs.get(record.fingerprint, record.order)
        else:
            store = await self._open(request.name, Deadline.after(0.0))
            spec = store.row_spec or store.spec
        key = ("keys", request.include_nested, request.leaves_only, request.sort)
        response: control_pb2.ListKeysResponse | None = spec.memo.get(key)
        if response is None:
            found = spec.keys(request.include_nested, request.leaves_only, sort=request.sort)
            response = control_pb2.ListKeysResponse()
            if all(isinstance(each, str) for each in found):
                response.keys.extend(each for each in found if isinstance(each, str))
            else:
                paths = ((each,) if isinstance(each, str) else each for each in found)
                response.paths.extend(content_pb2.Path(parts=path) for path in paths)
            spec.memo[key] = response
        return response
