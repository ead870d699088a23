"""The client of a server: stores of all kinds by name."""

from __future__ import annotations

import os
from typing import Any

from tdserve.base.config import TransportName
from tdserve.base.errors import InvalidRequestError, NotSupportedError, StoreExistsError, WrongStateError
from tdserve.base.ids import check_store_name
from tdserve.base.integers import check_integer
from tdserve.client.groups.group import Group, join_group
from tdserve.client.handles.handle import StoreHandle
from tdserve.client.movers.local import LocalMover
from tdserve.client.movers.remote import RemoteMover
from tdserve.client.session.description import StoreDescription, check_storage
from tdserve.client.session.mover import ClientMover
from tdserve.client.session.session import Session
from tdserve.client.tables.queue import QueueHandle
from tdserve.client.tables.replay import ReplayHandle
from tdserve.client.tensordicts.memmap.adopting import adopt_folder
from tdserve.client.weights.calls import WeightsClient
from tdserve.rules.catalog import Durability, check_durability, check_max_object_bytes
from tdserve.rules.replay.limiter import MinSize, Queue
from tdserve.rules.replay.order import Fifo, Lifo
from tdserve.rules.replay.settings import Settings
from tdserve.structure import codec
from tdserve.structure.capture import capture
from tdserve.structure.declaring import Declared, declare_ragged, widens
from tdserve.structure.fake_tensors import structure_of
from tdserve.structure.matching import quote
from tdserve.v1 import control_pb2


class Client(WeightsClient):
    """A connection to one server. Threads: safe. Pickled by address. In a forked child its own calls raise
    ForkedClientError, since its threads and sockets do not exist there; its handles go on with a client of the child's
    own.

    It reconnects by itself: a call during a restart of the server goes on when the server is back, or ends at its
    deadline. Every call takes ``timeout_s``: None is the client's default, 0 asks once without waiting.

    Args:
        address: ``host:port`` of the server.
        transport: How content moves. ``"auto"`` takes the best one available: ``"shm"`` on the server's machine,
            ``"nccl"`` if ``device`` is a GPU and the server has another, else ``"gloo"``. Any other is used, or the
            client raises.
        token: Bearer token, if the server requires one.
        timeout_s: Default for every call, seconds.
        allow_pickle: Whether non-tensor values of any type may be sent: those without a codec are pickled, and
            unpickled by readers with the same setting. Unpickling runs code that the writer chose, so set it only if
            all clients of the server are trusted. Other clients refuse to write such values, and get an error when they
            read one.
        device: The GPU that content is for, such as ``"cuda:0"``, if it may move from GPU to GPU by NCCL; results are
            still put there only by calls with ``device=``.
    """

    def __repr__(self) -> str:
        return f"<Client of {self.address}>"

    # ------------------------------------------------------------ folders of the user's

    def adopt(
        self,
        path: str | os.PathLike[str],
        name: str,
        *,
        read_only: bool = False,
        exists_ok: bool = False,
        existsok: bool = False,
        timeout_s: float | None = None,
    ) -> StoreHandle:
        """Makes a store of an existing folder that tensordict's ``memmap`` or ``save`` has written.

        No tensor is copied. Writes to the store change the user's files. What other programs write into these files
        meanwhile is read too, without the service's guarantees; they must not truncate the files while the store
        exists. ``delete`` forgets the store and leaves the folder as it is. Non-tensor values, which are in the
        folder's ``meta.json``, are read now and cannot be written: such a write raises NotSupportedError before
        anything is written. To change them, copy the store: ``client.memmap(store.to_tensordict(), name)``.

        Args:
            path: Of the folder, on the server's machine; a relative path starts at this process's current folder.
            name: Of the store.
            read_only: True refuses every write, and needs no permission to write the files.
            exists_ok: True returns the store of this name if it was adopted from this folder in the same way.

        Raises:
            NotSupportedError: The folder has something that a store cannot hold in place, which the error names: lazy
                stacks, nested tensors, pickled values. Or the files cannot be written. Or this client does not share
                the server's root, and the folder is not below one that was named to ``tdserve serve --adoptable``.
                Nothing was created.
            CorruptDataError: A file is missing, or shorter than its tensor. Nothing was created.
            StoreExistsError: The name is taken, or another store uses the folder. Nothing was created.
            InvalidRequestError: There is no such folder, or it is the server's own. Nothing was created.
        """
        deadline = self.deadline(timeout_s)
        adopt_folder(self, path, name, read_only=read_only, exists_ok=exists_ok or existsok, deadline=deadline)
        return StoreHandle(self, self.describe_existing(name, deadline))

    # ------------------------------------------------------------ replay stores

    def create_replay(
        self,
        name: str,
        like: Any,
        capacity: int,
        *,
        min_size: int = 1,
        sampler: Any = None,
        remover: Any = None,
        limiter: Any = None,
        max_times_sampled: int = 0,
        policy: str = "",
        ragged: Declared = None,
        max_object_bytes: int | None = None,
        durability: Durability | None = None,
        exists_ok: bool = False,
        existsok: bool = False,
    ) -> ReplayHandle:
        """Creates a replay store.

        Args:
            name: Of the store.
            like: One row; its content does not matter. It must not have the keys that sampling adds (``index``,
                ``generation``, ``priority``, ...). Nested tensors in the first batch make its tensors ragged.
            capacity: Rows of the ring; space for all of them is reserved now.
            min_size: Rows needed before a sample is drawn, if no ``limiter`` is given.
            sampler: ``tdserve.Uniform()`` (the default), ``Prioritized``, ``Fifo``, ``Lifo``, ``WithoutReplacement`` or
                ``Slices``.
            remover: Makes room when the table is full: ``tdserve.Fifo()`` (the default) or ``LowestPriority``.
            limiter: Decides when calls wait: ``tdserve.MinSize(min_size)`` (the default), ``SampleToInsertRatio`` or
                ``Queue``.
            max_times_sampled: A row is deleted after it was sampled this often; 0: never.
            policy: Name of the weights with which the rows are made; they need not be published yet. Each row gets a
                ``policy_version``, and ``sample(max_lag=)`` draws only rows of recent versions. When the weights' store
                is deleted, existing rows count as older than any lag.
            ragged: Keys of tensors whose size along their first dimension differs from row to row, or a dict of such
                keys with the dimensions that differ. Or the key of a nested part whose rows differ in their first batch
                dimension, such as chat histories; ``()`` is the row itself. Nested tensors and lazy stacks in ``like``
                are always ragged.
            max_object_bytes: Room for non-tensor values and ragged tensors, 1 GiB by default: address space. Its
                files grow as needed, and shrink only when the server starts.
            durability: ``"disk"``: a write is answered only when it is on the disk, and so survives a power failure.
                ``"process"``, the default: as soon as it survives the end of any process. What was written before the
                server's last sync survives a power failure in any case.
            exists_ok: True returns an existing replay of the same structure and settings.

        Raises:
            StoreExistsError, InvalidSpecError, InvalidRequestError, NotSupportedError, CapacityError: Nothing was
                created.
        """
        capacity = check_integer("capacity", capacity, 1)
        min_size = check_integer("min_size", min_size, 1)
        given = {"sampler": sampler, "remover": remover, "limiter": limiter or MinSize(min_size)}
        rules = {part: rule for part, rule in given.items() if rule is not None}
        settings = Settings(**rules, max_times_sampled=max_times_sampled, policy=policy)
        description = self._create_table(
            name, like, capacity, settings, exists_ok or existsok, max_object_bytes, durability, ragged
        )
        return ReplayHandle(self, description)

    def create_queue(
        self,
        name: str,
        like: Any,
        max_size: int,
        *,
        sampler: Any = None,
        policy: str = "",
        ragged: Declared = None,
        max_object_bytes: int | None = None,
        durability: Durability | None = None,
        exists_ok: bool = False,
        existsok: bool = False,
    ) -> QueueHandle:
        """Creates a queue: every row that is written is taken, and acknowledged, once.

        Args:
            name: Of the store.
            like: One row; its content does not matter.
            max_size: Rows that wait, or are taken and not acknowledged; when it is reached, writers wait.
            sampler: ``tdserve.Fifo()`` (the default), or ``tdserve.Lifo()`` for a stack.
            policy: As in ``create_replay``; ``take(max_lag=)`` discards rows of older versions.
            ragged: As in ``create_replay``.
            max_object_bytes, durability: As in ``create_replay``.
            exists_ok: True returns an existing queue of the same structure and settings.

        Raises:
            StoreExistsError, InvalidSpecError, InvalidRequestError, CapacityError: Nothing was created.
        """
        max_size = check_integer("max_size", max_size, 1)
        if sampler is not None and not isinstance(sampler, (Fifo, Lifo)):
            raise InvalidRequestError(argument="sampler", reason=f"{sampler!r} is neither Fifo() nor Lifo()")
        settings = Settings(sampler=sampler or Fifo(), limiter=Queue(max_size), is_queue=True, policy=policy)
        description = self._create_table(
            name, like, max_size, settings, exists_ok or existsok, max_object_bytes, durability, ragged
        )
        return QueueHandle(self, description)

    def queue(self, name: str, *, timeout_s: float | None = None) -> QueueHandle:
        """Returns the handle of a queue; waits for it if it does not exist yet.

        Raises:
            DeadlineExceededError: It was not created in time.
            StoreNotFoundError: It does not exist, with ``timeout_s=0``.
            WrongStateError: The store of this name is not a queue.
        """
        handle = self._handle(self.describe(name, timeout_s=timeout_s))
        if not isinstance(handle, QueueHandle):
            raise WrongStateError(state=f"store {name!r} is not a queue", event="queue()")
        return handle

    def _create_table(
        self,
        name: str,
        like: Any,
        capacity: int,
        settings: Settings,
        exists_ok: bool,
        max_object_bytes: int | None,
        durability: Durability | None,
        ragged: Declared,
    ) -> StoreDescription:
        settings.check(capacity)
        captured = structure_of(
            capture(like, store=check_store_name(name), allow_pickle=self.allow_pickle, takes_structure=True)
        )
        for path, leaf in captured.spec.values:
            if leaf.is_unbatched:
                reason = "all rows share it; put it into a store of its own"
                raise NotSupportedError(
                    feature=f"an UnbatchedTensor at key {quote(path)} of table {name!r}", reason=reason
                )
        spec = declare_ragged(captured.spec, captured.values, ragged, store=name)
        for key in settings.rule_keys:
            spec.find(key, store=name)
        request = control_pb2.CreateStoreRequest(
            name=name,
            kind=control_pb2.STORE_KIND_REPLAY,
            spec=codec.encode(spec),
            capacity=capacity,
            exists_ok=exists_ok,
            settings=settings.to_json(),
            max_object_bytes=check_max_object_bytes(max_object_bytes),
            durability=check_durability(durability),
        )
        try:
            return self._create(request, spec, None)[0]
        except StoreExistsError:
            # Rows of another size may have been written since another client created it with the same row.
            found = self.describe(name, timeout_s=0) if exists_ok else None
            is_same = found is not None and (found.settings, found.capacity) == (request.settings, capacity)
            if found is None or not is_same or not widens(spec, found.spec):
                raise
            check_storage(found, request)
            return found

    def replay(self, name: str, *, timeout_s: float | None = None) -> ReplayHandle:
        """Returns the handle of a replay store; waits for it if it does not exist yet.

        Raises:
            DeadlineExceededError: It was not created in time.
            StoreNotFoundError: It does not exist, with ``timeout_s=0``.
        """
        handle = self._handle(self.describe(name, timeout_s=timeout_s))
        if not isinstance(handle, ReplayHandle):
            raise WrongStateError(state=f"store {name!r} is not a replay", event="replay()")
        return handle

    # ------------------------------------------------------------ groups

    def group(
        self,
        name: str,
        world_size: int,
        rank: int | None = None,
        *,
        backend: str = "gloo",
        device: Any = None,
        interface: str | None = None,
        timeout_s: float | None = None,
    ) -> Group:
        """Joins a group of clients that exchange tensordicts among themselves; the server only introduces them.

        The group is formed once ``world_size`` clients have asked for this name. A client that asks for an existing
        group waits until it is admitted to the next epoch.

        Args:
            name: Of the group; groups are not stores, and are not kept.
            world_size: Members of the first epoch.
            rank: In the first epoch; None: by order of arrival.
            backend: ``"gloo"``, or ``"nccl"`` for tensors on GPUs; each member then needs a GPU of its own.
            device: CUDA device for the backend nccl; None is the current one.
            interface: Address at which the others reach this member; None: of the interface that reaches the server.

        Raises:
            DeadlineExceededError: The others did not join in time.
            InvalidRequestError: Another member has asked for the same rank, or another size or backend.
            NotSupportedError: NCCL is not available here, or two members share a GPU.
            ConnectError: The members cannot reach one another.
        """
        return join_group(
            self, name, world_size, rank, backend=backend, device=device, interface=interface, timeout_s=timeout_s
        )

    # ------------------------------------------------------------ figures

    def stats(self) -> dict[str, Any]:
        """Returns figures of the server and of this client's session, as plain values.

        ``transport`` is this session's, and ``why_not_nccl`` explains why it is not ``"nccl"`` although a GPU was named
        (else it is ``""``). ``transports`` counts bytes and transfers of the whole server by transport.
        ``bytes_relayed`` of these were sent from client to client, not through the server.
        """
        from_server = self.server_stats()
        session = self._session
        return {
            "address": self.address,
            "transport": session.transport if session is not None else None,
            "why_not_nccl": self.why_not_nccl,
            "session": session.welcome.session if session is not None else None,
            "server_id": from_server.server_id,
            "version": from_server.version,
            "uptime_s": from_server.uptime_s,
            "num_stores": from_server.num_stores,
            "num_sessions": from_server.num_sessions,
            "root": from_server.root,
            "root_free_bytes": from_server.root_free_bytes,
            "transports": {each.transport: _plain(each, skip="transport") for each in from_server.transports},
            "workers": [_plain(each) for each in from_server.workers],
            "sessions": [_plain(each) for each in from_server.sessions],
        }

    def make_mover(self, session: Session) -> ClientMover:
        """Makes a local mover if the session has access to the server's files, else a remote one."""
        return RemoteMover(self, session) if session.local is None else LocalMover(self, session, session.local)


def connect(
    address: str,
    *,
    transport: TransportName = "auto",
    token: str | None = None,
    timeout_s: float = 30.0,
    allow_pickle: bool = False,
    root: str | None = None,
    device: Any = None,
) -> Client:
    """Connects to a server; see ``Client`` for the arguments.

    Raises:
        ConnectError: The server did not answer within ``timeout_s``.
        UnauthenticatedError, ProtocolVersionError, NotSupportedError: The server or this version refuses the
            connection.
    """
    client = Client(
        address,
        transport=transport,
        token=token,
        timeout_s=timeout_s,
        allow_pickle=allow_pickle,
        root=root,
        device=device,
    )
    try:
        client.call(lambda *_: None, client.deadline(None))  # again, if the server is restarting
    except BaseException:
        client.close()
        raise
    return client


def _plain(message: Any, *, skip: str = "") -> dict[str, Any]:
    return {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields if field.name != skip}
