"""The client of a server: stores of all kinds by name."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from tdserve.client import weights as weight_calls
from tdserve.client.calls import SessionClient
from tdserve.client.description import StoreDescription, from_message
from tdserve.client.handle import StoreHandle
from tdserve.client.reading import Content, Destination, read_selection
from tdserve.client.replay import ReplayHandle, check_count
from tdserve.client.session import Session
from tdserve.client.weights import Weights
from tdserve.client.writing import write_selection
from tdserve.config import TransportName
from tdserve.errors import InvalidRequestError, LocalProtocolError, StoreExistsError, WrongStateError
from tdserve.ids import check_store_name
from tdserve.replay.limiter import MinSize
from tdserve.replay.settings import Settings
from tdserve.selection import Selection
from tdserve.spec import codec
from tdserve.spec.capture import Captured, capture
from tdserve.spec.tree import Path, Spec, check_matches
from tdserve.v1 import control_pb2

_EVERYTHING = Selection()


class Client(SessionClient):
    """A connection to one server. Threads: safe. Picklable (by address); made anew after ``fork``.

    It reconnects by itself: a call that meets a server in the middle of a restart goes on when the server is back, or ends
    at its deadline. Every call takes ``timeout_s``: None is the client's default, 0 asks once without waiting.

    Args:
        address: ``host:port`` of the server.
        transport: How content travels; ``"auto"`` takes the best there is (``"gloo"`` in this version).
        token: Bearer token, where the server asks for one.
        timeout_s: Default for every call, seconds.
        allow_pickle: Whether objects without a codec of their own may travel pickled.
    """

    def __init__(
        self,
        address: str,
        *,
        transport: TransportName = "auto",
        token: str | None = None,
        timeout_s: float = 30.0,
        allow_pickle: bool = False,
    ) -> None:
        super().__init__(address, transport=transport, token=token, timeout_s=timeout_s, allow_pickle=allow_pickle)
        self._weights_specs: dict[str, Spec] = {}

    def __repr__(self) -> str:
        return f"<Client of {self.address}>"

    def __getitem__(self, name: str) -> StoreHandle | ReplayHandle:
        """A handle of a tensordict or replay store. Raises StoreNotFoundError."""
        return self._handle(self.describe(name))

    # ------------------------------------------------------------ tensordict stores

    def init_remote(self, td: Any, name: str, *, exists_ok: bool = False, timeout_s: float | None = None) -> int:
        """Creates a store from a tensordict: metadata, then content. It becomes visible whole.

        Args:
            td: TensorDict or tensorclass instance.
            name: Of the store.
            exists_ok: True writes the content into an existing store of the same structure.

        Returns:
            The store's content version.

        Raises:
            StoreExistsError: The name is taken (by another structure). Nothing was written.
            NotSupportedError: A leaf cannot be stored; names its key. Nothing was created.
            CapacityError: No room on the server's disk. Nothing was created.
        """
        captured = capture(td, store=name)
        deadline = self.deadline(timeout_s)
        request = control_pb2.CreateStoreRequest(
            name=check_store_name(name),
            kind=control_pb2.STORE_KIND_TENSORDICT,
            spec=codec.encode(captured.spec),
            loading=True,
        )

        def create(session: Session) -> None:
            is_first = not request.session
            request.session = session.welcome.session
            try:
                self._call("CreateStore", request, timeout_s=deadline.remaining_s)
            except StoreExistsError:
                if is_first:
                    raise
                # Else it may be the one that an earlier session has made: then the write is known, and answered.

        try:
            return write_selection(
                self,
                name,
                _EVERYTHING,
                captured,
                fingerprint=captured.spec.fingerprint,
                create=create,
                deadline=deadline,
            )
        except StoreExistsError:
            if not exists_ok:
                raise
            return self._replace(name, captured, deadline=deadline)

    def from_remote_init(
        self,
        name: str,
        *,
        device: Any = None,
        keys: Sequence[str | Path] | None = None,
        out: Any = None,
        timeout_s: float | None = None,
    ) -> Any:
        """A matching tensordict, built and filled.

        Args:
            name: Of the store; waited for if it does not exist yet.
            device: Where the tensors go; None leaves them on the CPU.
            keys: Leaves or nested parts to fetch; None is all.
            out: Filled in place of a new tensordict; must fit.

        Raises:
            StoreNotFoundError: With ``timeout_s=0``.
            DeadlineExceededError: The store did not come in time.
            SpecMismatchError: ``out`` does not fit; nothing was written to it.
        """
        paths = [(key,) if isinstance(key, str) else tuple(key) for key in keys or ()]
        content = self._fetch(name, paths, out=out, timeout_s=timeout_s)
        if content is None:
            raise LocalProtocolError(reason="a read without newer_than brought nothing")
        return content.build(device) if out is None else out

    def send(self, td: Any, name: str, *, timeout_s: float | None = None) -> int:
        """Replaces a store's content, whole; returns the content version it made.

        Raises:
            StoreNotFoundError: There is no such store: ``init_remote`` makes one.
            SpecMismatchError: The tensordict does not fit. Nothing was written.
        """
        return self._replace(name, capture(td, store=name), deadline=self.deadline(timeout_s))

    def recv(
        self, td: Any, name: str, *, newer_than: int | None = None, timeout_s: float | None = None
    ) -> int | None:
        """Fills a tensordict in place with a store's content.

        Args:
            td: Of the store's structure.
            newer_than: Waits for a content version above this one. Nothing is queued: of several versions written
                meanwhile only the newest is seen.

        Returns:
            The content version, or None when ``timeout_s=0`` and there is nothing newer.
        """
        content = self._fetch(name, (), out=td, newer_than=newer_than, timeout_s=timeout_s)
        return None if content is None else content.version

    def memmap(self, td: Any, name: str, *, exists_ok: bool = False, timeout_s: float | None = None) -> StoreHandle:
        """Creates a store from a tensordict and returns its handle; as ``init_remote``."""
        self.init_remote(td, name, exists_ok=exists_ok, timeout_s=timeout_s)
        return StoreHandle(self, self.describe(name))

    def memmap_like(
        self,
        like: Any,
        name: str,
        *,
        batch_size: Sequence[int] = (),
        exists_ok: bool = False,
        timeout_s: float | None = None,
    ) -> StoreHandle:
        """Creates a store of zeros with the structure of ``like``.

        Args:
            like: TensorDict or tensorclass instance; its content does not matter, but for non-tensor values, which are
                kept.
            batch_size: Dimensions put in front of ``like``'s own.
            exists_ok: True returns an existing store of the same structure.

        Raises:
            StoreExistsError, NotSupportedError, CapacityError: Nothing was created.
        """
        captured = capture(like, store=name)
        sizes = tuple(batch_size)
        if any(isinstance(size, bool) or not isinstance(size, int) or size < 0 for size in sizes):
            raise InvalidRequestError(argument="batch_size", reason=f"{list(sizes)} has a size that is no natural number")
        spec = captured.spec.prepend(sizes) if sizes else captured.spec
        description = self._create(
            control_pb2.CreateStoreRequest(
                name=check_store_name(name),
                kind=control_pb2.STORE_KIND_TENSORDICT,
                spec=codec.encode(spec),
                exists_ok=exists_ok,
            ),
            spec,
            timeout_s,
        )
        handle = StoreHandle(self, description)
        if spec.values and prod(sizes):
            values_only = spec.select([path for path, _ in spec.values])
            content = Captured(values_only, {}, captured.values)
            keys = [path for path, _ in spec.values]
            write_selection(
                self,
                name,
                _EVERYTHING,
                content,
                keys=keys,
                fingerprint=spec.fingerprint,
                deadline=self.deadline(timeout_s),
            )
        return handle

    def load_memmap(self, name: str, *, device: Any = None, out: Any = None, timeout_s: float | None = None) -> Any:
        """The content of a store as a local tensordict; as ``from_remote_init``."""
        return self.from_remote_init(name, device=device, out=out, timeout_s=timeout_s)

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
        exists_ok: bool = False,
    ) -> ReplayHandle:
        """Creates a replay store.

        Args:
            name: Of the store.
            like: One row; its content does not matter. It must not have the keys that sampling adds (``index``,
                ``generation``, ``priority``, ...).
            capacity: Rows of the ring; space for all of them is reserved now.
            min_size: Rows needed before a sample is drawn.
            sampler, remover, limiter: Rules of ``tdserve.replay``; uniform, first in first out, and ``min_size``.
            exists_ok: True returns an existing replay of the same structure and settings.

        Raises:
            StoreExistsError, InvalidSpecError, InvalidRequestError, NotSupportedError, CapacityError: Nothing was created.
        """
        check_count("capacity", capacity)
        check_count("min_size", min_size)
        spec = capture(like, store=name).spec
        given = {"sampler": sampler, "remover": remover, "limiter": limiter or MinSize(min_size)}
        settings = Settings(**{part: rule for part, rule in given.items() if rule is not None})
        settings.limiter.check(capacity)
        request = control_pb2.CreateStoreRequest(
            name=check_store_name(name),
            kind=control_pb2.STORE_KIND_REPLAY,
            spec=codec.encode(spec),
            capacity=capacity,
            exists_ok=exists_ok,
            settings=settings.to_json(),
        )
        return ReplayHandle(self, self._create(request, spec, None))

    def replay(self, name: str, *, timeout_s: float | None = None) -> ReplayHandle:
        """The handle of a replay store, waited for if it does not exist yet.

        Raises:
            DeadlineExceededError: It did not come in time.
            StoreNotFoundError: With ``timeout_s=0``.
        """
        handle = self._handle(self.describe(name, timeout_s=timeout_s))
        if not isinstance(handle, ReplayHandle):
            raise WrongStateError(state=f"store {name!r} is a tensordict store", event="replay()")
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
    ) -> int:
        """Publishes the next version of some weights; the first makes their store.

        Args:
            td: TensorDict (for instance ``TensorDict.from_module(policy)``) or ``nn.Module``.
            metadata: Small values for readers, such as ``{"step": 10}``.
            keep: Newest versions that stay readable; 0 leaves it as it is (2 at first).

        Returns:
            The version; it is visible whole, and only when this returns.
        """
        deadline = self.deadline(timeout_s)
        return weight_calls.publish(self, name, td, metadata=metadata, keep=keep, deadline=deadline)

    def latest(
        self,
        name: str,
        *,
        newer_than: int | None = None,
        timeout_s: float | None = None,
        out: Any = None,
        device: Any = None,
    ) -> Weights | None:
        """The newest version of some weights, one version whole.

        Args:
            newer_than: Waits for a version above this one.
            timeout_s: With 0 and nothing newer, None is returned.
            out: Filled in place; received into directly where its leaves are contiguous CPU tensors.

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
            "transport": session.welcome.transport if session is not None else None,
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

    def _handle(self, description: StoreDescription) -> StoreHandle | ReplayHandle:
        if description.kind == "replay":
            return ReplayHandle(self, description)
        if description.kind == "weights":
            state = f"store {description.name!r} holds weights"
            raise WrongStateError(state=state, event="a handle; use latest()")
        return StoreHandle(self, description)

    def _create(
        self, request: control_pb2.CreateStoreRequest, spec: Spec, timeout_s: float | None
    ) -> StoreDescription:
        response = self._call("CreateStore", request, timeout_s=self.deadline(timeout_s).remaining_s)
        description = response.description
        description.spec.CopyFrom(codec.encode(spec))
        return from_message(description)

    def _fetch(
        self,
        name: str,
        keys: Sequence[Path],
        *,
        out: Any,
        newer_than: int | None = None,
        timeout_s: float | None = None,
    ) -> Content | None:
        return read_selection(
            self,
            check_store_name(name),
            _EVERYTHING,
            keys=keys,
            newer_than=newer_than,
            deadline=self.deadline(timeout_s),
            destination=None if out is None else Destination(out, store=name),
        )

    def _replace(self, name: str, captured: Captured, *, deadline: Any) -> int:
        handle = self._handle(self.describe(name))
        if not isinstance(handle, StoreHandle):
            raise WrongStateError(state=f"store {name!r} is a replay", event="send()")
        check_matches(handle.spec, captured.spec, store=name)
        return write_selection(
            self, name, _EVERYTHING, captured, fingerprint=handle.spec.fingerprint, deadline=deadline
        )


def connect(
    address: str,
    *,
    transport: TransportName = "auto",
    token: str | None = None,
    timeout_s: float = 30.0,
    allow_pickle: bool = False,
) -> Client:
    """Connects to a server; see ``Client`` for the arguments.

    Raises:
        ConnectError: Nobody answered within ``timeout_s``.
        UnauthenticatedError, ProtocolVersionError, NotSupportedError: The server or this version refuses.
    """
    client = Client(address, transport=transport, token=token, timeout_s=timeout_s, allow_pickle=allow_pickle)
    try:
        client.session(client.deadline(None))
    except BaseException:
        client.close()
        raise
    return client


def _plain(message: Any, *, skip: str = "") -> dict[str, Any]:
    return {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields if field.name != skip}
