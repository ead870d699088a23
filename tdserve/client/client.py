"""The client of a server: stores of all kinds by name."""

from __future__ import annotations

from typing import Any

from tdserve.catalog import checked_max_object_bytes
from tdserve.client import weights as weight_calls
from tdserve.client.description import StoreDescription
from tdserve.client.queue import QueueHandle
from tdserve.client.replay import ReplayHandle
from tdserve.client.table import check_count
from tdserve.client.tensordicts import TensorDictClient
from tdserve.client.weights import Weights
from tdserve.config import TransportName
from tdserve.errors import InvalidRequestError, StoreExistsError, WrongStateError
from tdserve.ids import check_store_name
from tdserve.replay.limiter import MinSize, Queue
from tdserve.replay.order import Fifo, Lifo
from tdserve.replay.settings import Settings
from tdserve.spec import codec
from tdserve.spec.capture import capture
from tdserve.spec.declaring import Declared, declared, widens
from tdserve.spec.tree import Spec
from tdserve.v1 import control_pb2


class Client(TensorDictClient):
    """A connection to one server. Threads: safe. Picklable (by address); made anew after ``fork``.

    It reconnects by itself: a call that meets a server in the middle of a restart goes on when the server is back, or
    ends at its deadline. Every call takes ``timeout_s``: None is the client's default, 0 asks once without waiting.

    Args:
        address: ``host:port`` of the server.
        transport: How content travels; ``"auto"`` takes the best there is (``"gloo"`` in this version).
        token: Bearer token, where the server asks for one.
        timeout_s: Default for every call, seconds.
        allow_pickle: Whether non-tensor values of any type may travel: those without a codec of their own are pickled,
            and unpickled by readers that said so too. Unpickling runs code that the writer chose: only for servers
            all of whose clients are trusted. Others refuse such values, and get an error when they read one.
    """

    def __init__(
        self,
        address: str,
        *,
        transport: TransportName = "auto",
        token: str | None = None,
        timeout_s: float = 30.0,
        allow_pickle: bool = False,
        root: str | None = None,
    ) -> None:
        super().__init__(
            address, transport=transport, token=token, timeout_s=timeout_s, allow_pickle=allow_pickle, root=root
        )
        self._weights_specs: dict[str, Spec] = {}

    def __repr__(self) -> str:
        return f"<Client of {self.address}>"

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
        ragged: Declared = None,
        max_object_bytes: int | None = None,
        exists_ok: bool = False,
        existsok: bool = False,
    ) -> ReplayHandle:
        """Creates a replay store.

        Args:
            name: Of the store.
            like: One row; its content does not matter. It must not have the keys that sampling adds (``index``,
                ``generation``, ``priority``, ...).
            capacity: Rows of the ring; space for all of them is reserved now.
            min_size: Rows needed before a sample is drawn, where no ``limiter`` is given.
            sampler: ``tdserve.Uniform()`` (the default), ``Prioritized``, ``Fifo``, ``Lifo``, ``WithoutReplacement`` or
                ``Slices``.
            remover: What makes room when the table is full: ``tdserve.Fifo()`` (the default) or ``LowestPriority``.
            limiter: Who waits: ``tdserve.MinSize(min_size)`` (the default), ``SampleToInsertRatio`` or ``Queue``.
            max_times_sampled: A row is deleted when it was sampled so often; 0: never for that.
            ragged: Keys of tensors whose size along their first dimension differs from row to row, or a dict of such
                keys with the dimensions that differ; the key of a nested part whose rows differ in their first batch
                dimension, such as chat histories (``()`` is the row itself). What is nested or a lazy stack in ``like``
                is ragged anyway.
            max_object_bytes: Room for its non-tensor values and ragged tensors, 1 GiB by default: address space that
                is used as it is needed, for good.
            exists_ok: True returns an existing replay of the same structure and settings.

        Raises:
            StoreExistsError, InvalidSpecError, InvalidRequestError, NotSupportedError, CapacityError: Nothing was
                created.
        """
        check_count("capacity", capacity)
        check_count("min_size", min_size)
        given = {"sampler": sampler, "remover": remover, "limiter": limiter or MinSize(min_size)}
        rules = {part: rule for part, rule in given.items() if rule is not None}
        settings = Settings(**rules, max_times_sampled=max_times_sampled)
        description = self._create_table(
            name, like, capacity, settings, exists_ok or existsok, max_object_bytes, ragged
        )
        return ReplayHandle(self, description)

    def create_queue(
        self,
        name: str,
        like: Any,
        max_size: int,
        *,
        sampler: Any = None,
        ragged: Declared = None,
        max_object_bytes: int | None = None,
        exists_ok: bool = False,
        existsok: bool = False,
    ) -> QueueHandle:
        """Creates a queue: every row that is written is taken, and acknowledged, once.

        Args:
            name: Of the store.
            like: One row; its content does not matter.
            max_size: Rows that wait or are taken and not acknowledged; beyond it writers wait.
            sampler: ``tdserve.Fifo()`` (the default), or ``tdserve.Lifo()`` for a stack.
            ragged: As in ``create_replay``.
            max_object_bytes: As in ``create_replay``.
            exists_ok: True returns an existing queue of the same structure and settings.

        Raises:
            StoreExistsError, InvalidSpecError, InvalidRequestError, CapacityError: Nothing was created.
        """
        check_count("max_size", max_size)
        if sampler is not None and not isinstance(sampler, (Fifo, Lifo)):
            raise InvalidRequestError(argument="sampler", reason=f"{sampler!r} is neither Fifo() nor Lifo()")
        settings = Settings(sampler=sampler or Fifo(), limiter=Queue(max_size), is_queue=True)
        description = self._create_table(
            name, like, max_size, settings, exists_ok or existsok, max_object_bytes, ragged
        )
        return QueueHandle(self, description)

    def queue(self, name: str, *, timeout_s: float | None = None) -> QueueHandle:
        """The handle of a queue, waited for if it does not exist yet.

        Raises:
            DeadlineExceededError: It did not come in time.
            StoreNotFoundError: With ``timeout_s=0``.
            WrongStateError: The store of this name is no queue.
        """
        handle = self._handle(self.describe(name, timeout_s=timeout_s))
        if not isinstance(handle, QueueHandle):
            raise WrongStateError(state=f"store {name!r} is no queue", event="queue()")
        return handle

    def _create_table(
        self,
        name: str,
        like: Any,
        capacity: int,
        settings: Settings,
        exists_ok: bool,
        max_object_bytes: int | None,
        ragged: Declared,
    ) -> StoreDescription:
        settings.check(capacity)
        captured = capture(like, store=name, allow_pickle=self.allow_pickle)
        spec = declared(captured.spec, captured.values, ragged, store=name)
        for key in settings.rule_keys:
            spec.find(key, store=name)
        request = control_pb2.CreateStoreRequest(
            name=check_store_name(name),
            kind=control_pb2.STORE_KIND_REPLAY,
            spec=codec.encode(spec),
            capacity=capacity,
            exists_ok=exists_ok,
            settings=settings.to_json(),
            max_object_bytes=checked_max_object_bytes(max_object_bytes),
        )
        try:
            return self._create(request, spec, None)[0]
        except StoreExistsError:
            # Rows of another size may have come since somebody else made it of the same row.
            found = self.describe(name, timeout_s=0) if exists_ok else None
            is_same = found is not None and (found.settings, found.capacity) == (request.settings, capacity)
            if found is None or not is_same or not widens(spec, found.spec):
                raise
            return found

    def replay(self, name: str, *, timeout_s: float | None = None) -> ReplayHandle:
        """The handle of a replay store, waited for if it does not exist yet.

        Raises:
            DeadlineExceededError: It did not come in time.
            StoreNotFoundError: With ``timeout_s=0``.
        """
        handle = self._handle(self.describe(name, timeout_s=timeout_s))
        if not isinstance(handle, ReplayHandle):
            raise WrongStateError(state=f"store {name!r} is no replay", event="replay()")
        return handle

    # ------------------------------------------------------------ weights

    def publish(
        self,
        name: str,
        td: Any,
        *,
        metadata: dict[str, Any] | None = None,
        keep: int = 0,
        timeout_s: float | None = None,
        return_early: bool = False,
    ) -> Any:
        """Publishes the next version of some weights; the first makes their store.

        Args:
            td: TensorDict (for instance ``TensorDict.from_module(policy)``) or ``nn.Module``.
            metadata: Small values for readers, such as ``{"step": 10}``.
            keep: Newest versions that stay readable; 0 leaves it as it is (2 at first).

        Returns:
            The version, or a future of it; it is visible whole, and only then.
        """
        deadline = self.deadline(timeout_s)

        def publish() -> int:
            return weight_calls.publish(self, name, td, metadata=metadata, keep=keep, deadline=deadline)

        return self.perform(publish, return_early)

    def latest(
        self,
        name: str,
        *,
        newer_than: int | None = None,
        timeout_s: float | None = None,
        out: Any = None,
        device: Any = None,
        copy: bool = True,
    ) -> Weights | None:
        """The newest version of some weights, one version whole.

        Args:
            newer_than: Waits for a version above this one.
            timeout_s: With 0 and nothing newer, None is returned.
            out: Filled in place; received into directly where its leaves are contiguous CPU tensors.
            copy: False maps the version's file instead, over the transport ``shm``: nothing is copied, whatever the
                size, and all processes share the memory. What is written into these tensors stays in this process.
                The file lives as long as any of them. Over another transport it makes no difference.

        Raises:
            DeadlineExceededError: There was none in time.
            SpecMismatchError: ``out`` does not fit; nothing was written to it.
        """
        return weight_calls.latest(
            self,
            name,
            newer_than=newer_than,
            out=out,
            device=device,
            copy=copy,
            known=self._weights_specs,
            deadline=self.deadline(timeout_s),
        )

    # ------------------------------------------------------------ figures

    def stats(self) -> dict[str, Any]:
        """Figures of the server and of this client's session, as plain values.

        ``transport`` is this session's; ``transports`` counts bytes and transfers of the whole server by transport.
        """
        from_server = self.server_stats()
        session = self._session
        return {
            "address": self.address,
            "transport": session.transport if session is not None else None,
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


def connect(
    address: str,
    *,
    transport: TransportName = "auto",
    token: str | None = None,
    timeout_s: float = 30.0,
    allow_pickle: bool = False,
    root: str | None = None,
) -> Client:
    """Connects to a server; see ``Client`` for the arguments.

    Raises:
        ConnectError: Nobody answered within ``timeout_s``.
        UnauthenticatedError, ProtocolVersionError, NotSupportedError: The server or this version refuses.
    """
    client = Client(
        address, transport=transport, token=token, timeout_s=timeout_s, allow_pickle=allow_pickle, root=root
    )
    try:
        client.call(lambda *_: None, client.deadline(None))  # again, should the server be in the middle of a restart
    except BaseException:
        client.close()
        raise
    return client


def _plain(message: Any, *, skip: str = "") -> dict[str, Any]:
    return {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields if field.name != skip}
