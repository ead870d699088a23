"""The calls of a client on tensordict stores: tensordict's own names, with a store's name in place of a rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tdserve.client.calls import SessionClient
from tdserve.client.description import StoreDescription, from_message
from tdserve.client.handle import StoreHandle
from tdserve.client.queue import QueueHandle
from tdserve.client.reading import Content, Destination, read_selection
from tdserve.client.replay import ReplayHandle
from tdserve.client.session import Session
from tdserve.client.writing import write_selection
from tdserve.deadline import Deadline
from tdserve.errors import InvalidRequestError, LocalProtocolError, StoreExistsError, WrongStateError
from tdserve.ids import check_store_name
from tdserve.replay.settings import Settings
from tdserve.selection import Selection
from tdserve.spec import codec
from tdserve.spec.capture import Captured, capture
from tdserve.spec.tree import Path, Spec, check_matches
from tdserve.v1 import control_pb2

_EVERYTHING = Selection()


class TensorDictClient(SessionClient):
    """Adds the tensordict stores.

    Wherever a call takes ``exists_ok``, tensordict's spelling ``existsok`` is accepted too; the default is False,
    unlike tensordict's: nothing is overwritten in silence. ``return_early=True`` gives a future of the result at once;
    the tensordict must not change before it is done.
    """

    def __getitem__(self, name: str) -> Any:
        """The handle of a store: a StoreHandle or a ReplayHandle, as its kind is. Raises StoreNotFoundError."""
        return self._handle(self.describe(name))

    def init_remote(
        self,
        td: Any,
        name: str,
        *,
        exists_ok: bool = False,
        existsok: bool = False,
        timeout_s: float | None = None,
        return_early: bool = False,
    ) -> Any:
        """Creates a store from a tensordict: metadata, then content. It becomes visible whole.

        Args:
            td: TensorDict or tensorclass instance.
            name: Of the store.
            exists_ok: True writes the content into an existing store of the same structure.

        Returns:
            The store's content version, or a future of it.

        Raises:
            StoreExistsError: The name is taken (by another structure). Nothing was written.
            NotSupportedError: A leaf cannot be stored; names its key. Nothing was created.
            CapacityError: No room on the server's disk. Nothing was created.
        """
        captured = capture(td, store=check_store_name(name))
        deadline = self.deadline(timeout_s)
        return self.perform(
            lambda: self._fill_new(name, captured, deadline, exists_ok=exists_ok or existsok), return_early
        )

    def from_remote_init(
        self,
        name: str,
        *,
        device: Any = None,
        keys: Sequence[str | Path] | None = None,
        out: Any = None,
        timeout_s: float | None = None,
        return_early: bool = False,
    ) -> Any:
        """A matching tensordict, built and filled, or a future of it.

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
        destination = None if out is None else Destination(out, store=name)
        deadline = self.deadline(timeout_s)

        def fetch() -> Any:
            content = self._fetch(name, deadline, keys=paths, destination=destination)
            if content is None:
                raise LocalProtocolError(reason="a read without newer_than brought nothing")
            return content.build(device) if out is None else out

        return self.perform(fetch, return_early)

    def send(self, td: Any, name: str, *, timeout_s: float | None = None, return_early: bool = False) -> Any:
        """Replaces a store's content, whole; returns the content version it made, or a future of it.

        Raises:
            StoreNotFoundError: There is no such store: ``init_remote`` makes one.
            SpecMismatchError: The tensordict does not fit. Nothing was written.
        """
        captured = capture(td, store=name)
        deadline = self.deadline(timeout_s)
        return self.perform(lambda: self._replace(name, captured, deadline=deadline), return_early)

    def recv(self, td: Any, name: str, *, newer_than: int | None = None, timeout_s: float | None = None) -> int | None:
        """Fills a tensordict in place with a store's content.

        Args:
            td: Of the store's structure.
            newer_than: Waits for a content version above this one. Nothing is queued: of several versions written
                meanwhile only the newest is seen.

        Returns:
            The content version, or None when ``timeout_s=0`` and there is nothing newer.
        """
        destination = Destination(td, store=name)
        content = self._fetch(name, self.deadline(timeout_s), newer_than=newer_than, destination=destination)
        return None if content is None else content.version

    def memmap(
        self,
        td: Any,
        name: str,
        *,
        exists_ok: bool = False,
        existsok: bool = False,
        timeout_s: float | None = None,
        return_early: bool = False,
    ) -> Any:
        """Creates a store from a tensordict as ``init_remote`` does, and returns its handle, or a future of it."""
        captured = capture(td, store=check_store_name(name))
        deadline = self.deadline(timeout_s)

        def fill() -> StoreHandle:
            self._fill_new(name, captured, deadline, exists_ok=exists_ok or existsok)
            return StoreHandle(self, self.describe(name))

        return self.perform(fill, return_early)

    def memmap_like(
        self,
        like: Any,
        name: str,
        *,
        batch_size: Sequence[int] = (),
        exists_ok: bool = False,
        existsok: bool = False,
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
            raise InvalidRequestError(
                argument="batch_size", reason=f"{list(sizes)} has a size that is no natural number"
            )
        spec = captured.spec.prepend(sizes) if sizes else captured.spec
        description, created = self._create(
            control_pb2.CreateStoreRequest(
                name=check_store_name(name),
                kind=control_pb2.STORE_KIND_TENSORDICT,
                spec=codec.encode(spec),
                exists_ok=exists_ok or existsok,
            ),
            spec,
            timeout_s,
        )
        handle = StoreHandle(self, description)
        if spec.values and created and 0 not in sizes:
            values_only = spec.select([path for path, _ in spec.values])
            content = Captured(values_only, {}, captured.values, {})
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

    def _fill_new(self, name: str, captured: Captured, deadline: Deadline, *, exists_ok: bool) -> int:
        request = control_pb2.CreateStoreRequest(
            name=name,
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

    def _handle(self, description: StoreDescription) -> StoreHandle | ReplayHandle | QueueHandle:
        if description.kind == "replay":
            is_queue = Settings.from_json(description.settings).is_queue
            return QueueHandle(self, description) if is_queue else ReplayHandle(self, description)
        if description.kind == "weights":
            state = f"store {description.name!r} holds weights"
            raise WrongStateError(state=state, event="a handle; use latest()")
        return StoreHandle(self, description)

    def _create(
        self, request: control_pb2.CreateStoreRequest, spec: Spec, timeout_s: float | None
    ) -> tuple[StoreDescription, bool]:
        response = self._call("CreateStore", request, timeout_s=self.deadline(timeout_s).remaining_s)
        description = response.description
        description.spec.CopyFrom(codec.encode(spec))
        return from_message(description), bool(response.created)

    def _fetch(
        self,
        name: str,
        deadline: Deadline,
        *,
        keys: Sequence[Path] = (),
        newer_than: int | None = None,
        destination: Destination | None = None,
    ) -> Content | None:
        return read_selection(
            self,
            check_store_name(name),
            _EVERYTHING,
            keys=keys,
            newer_than=newer_than,
            deadline=deadline,
            destination=destination,
        )

    def _replace(self, name: str, captured: Captured, *, deadline: Deadline) -> int:
        handle = self._handle(self.describe(name))
        if not isinstance(handle, StoreHandle):
            raise WrongStateError(state=f"store {name!r} is a replay", event="send()")
        check_matches(handle.spec, captured.spec, store=name)
        return write_selection(
            self, name, _EVERYTHING, captured, fingerprint=handle.spec.fingerprint, deadline=deadline
        )
