"""The calls of a client on tensordict stores: tensordict's own names, with a store's name in place of a rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tdserve.base.deadline import Deadline
from tdserve.base.errors import StoreExistsError, StructureChangedError, WrongStateError
from tdserve.base.ids import check_store_name
from tdserve.base.integers import check_version
from tdserve.client.content.fake_modes import check_real
from tdserve.client.content.padding import Pad
from tdserve.client.content.read_content import Content, Destination, only
from tdserve.client.handles.handle import StoreHandle
from tdserve.client.handles.live_values import with_live_leaves
from tdserve.client.session.calls import SessionClient
from tdserve.client.session.description import StoreDescription, check_storage, from_message
from tdserve.client.session.session import Session
from tdserve.client.tables.queue import QueueHandle
from tdserve.client.tables.replay import ReplayHandle
from tdserve.client.transfers.read_selection import read_selection, require_content
from tdserve.client.transfers.write import write_selection
from tdserve.messages.selection.selection import Selection
from tdserve.rules.catalog import Durability, check_durability, check_max_object_bytes
from tdserve.rules.replay.settings import Settings
from tdserve.structure import codec
from tdserve.structure.capture import Captured, capture
from tdserve.structure.fake_tensors import without_content
from tdserve.structure.tree import Path, Spec, check_matches
from tdserve.v1 import control_pb2

_EVERYTHING = Selection()


class TensorDictClient(SessionClient):
    """A client with tensordict stores.

    Every call with ``exists_ok`` accepts tensordict's spelling ``existsok`` too. The default is False, unlike
    tensordict's: nothing is overwritten without an error. ``return_early=True`` returns a future of the result at once;
    the tensordict must not change before it is done.
    """

    def __getitem__(self, name: str) -> Any:
        """Returns the handle of a store: a StoreHandle or a ReplayHandle, by its kind. Raises StoreNotFoundError."""
        return self._handle(self.describe(name))

    def init_remote(
        self,
        td: Any,
        name: str,
        *,
        exists_ok: bool = False,
        existsok: bool = False,
        share_non_tensor: bool = False,
        max_object_bytes: int | None = None,
        durability: Durability | None = None,
        timeout_s: float | None = None,
        return_early: bool = False,
    ) -> Any:
        """Creates a store from a tensordict: first the structure, then the content. It becomes visible as a whole.

        Args:
            td: TensorDict or tensorclass instance. The file of a PersistentTensorDict is read while it is sent, and the
                store reads as a TensorDict. Of meta and fake tensors only the structure is stored: the store reads as
                meta tensors until it is first written, and then as its content, with zeros where nothing was written.
            name: Of the store.
            exists_ok: True writes the content into an existing store of the same structure.
            share_non_tensor: True makes the non-tensor leaves live in tensordicts that are loaded from the store or
                read by its
                handle: each access reads the newest value, and an in-place update is a write. An existing store keeps
                its own setting.
            max_object_bytes: Room for non-tensor values and ragged tensors, 1 GiB by default: address space. Its files
                grow as needed, and shrink only when the server starts.
            durability: ``"disk"``: a write is answered only when it is on the disk, and so survives a power failure.
                ``"process"``, the default: as soon as it survives the end of any process. What was written before the
                server's last sync survives a power failure in any case.

        Returns:
            The store's content version, or a future of it.

        Raises:
            StoreExistsError: The name is taken (with ``exists_ok``: by another structure). Nothing was written.
            NotSupportedError: A leaf cannot be stored; the error names its key. Nothing was created.
            CapacityError: The server's disk has no room. Nothing was created.
        """
        captured = capture(
            td, store=check_store_name(name), allow_pickle=self.allow_pickle, is_exact=True, takes_structure=True
        )
        deadline = self.deadline(timeout_s)
        return self.perform(
            lambda: self._fill_new(
                name,
                captured,
                td,
                deadline,
                exists_ok=exists_ok or existsok,
                share_non_tensor=share_non_tensor,
                max_object_bytes=max_object_bytes,
                durability=durability,
            ),
            return_early,
        )

    def from_remote_init(
        self,
        name: str,
        *,
        device: Any = None,
        keys: Sequence[str | Path] | None = None,
        out: Any = None,
        pad: Pad = None,
        timeout_s: float | None = None,
        return_early: bool = False,
    ) -> Any:
        """Builds a matching tensordict, fills it, and returns it or a future of it.

        Args:
            name: Of the store; waits for it if it does not exist yet.
            device: Where the tensors are moved; None leaves them on the CPU.
            keys: Leaves or nested parts to fetch; None is all.
            out: Filled instead of a new tensordict; must fit.
            pad: Pads ragged tensors to the longest of them with this number (or numbers by key), and adds masks of the
                content under ``("masks", *key)``; None leaves them ragged.

        Raises:
            StoreNotFoundError: It does not exist, with ``timeout_s=0``.
            DeadlineExceededError: The store was not created in time.
            SpecMismatchError: ``out`` does not fit; nothing was written to it.
        """
        paths = [(key,) if isinstance(key, str) else tuple(key) for key in keys or ()]
        destination = None if out is None else Destination(out, store=check_store_name(name))
        deadline = self.deadline(timeout_s)

        def fetch() -> Any:
            content = require_content(self._fetch(name, deadline, keys=paths, destination=destination, device=device))
            return only(self._show_content(name, content, device, pad), paths, content.spec) if out is None else out

        return self.perform(fetch, return_early)

    def send(self, td: Any, name: str, *, timeout_s: float | None = None, return_early: bool = False) -> Any:
        """Replaces a store's content as a whole; returns the content version of the write, or a future of it.

        Raises:
            StoreNotFoundError: There is no such store; ``init_remote`` creates one.
            SpecMismatchError: The tensordict does not fit. Nothing was written.
        """
        captured = capture(td, store=check_store_name(name), allow_pickle=self.allow_pickle)
        deadline = self.deadline(timeout_s)
        return self.perform(lambda: self._replace(name, captured, td, deadline=deadline), return_early)

    def recv(self, td: Any, name: str, *, newer_than: int | None = None, timeout_s: float | None = None) -> int | None:
        """Fills a tensordict in place with a store's content.

        Args:
            td: Of the store's structure.
            newer_than: Waits for a content version above this one. Nothing is queued: of several versions that are
                written meanwhile only the newest is read.

        Returns:
            The content version, or None when ``timeout_s=0`` and there is nothing newer.
        """
        newer_than = None if newer_than is None else check_version("newer_than", newer_than)
        destination = Destination(td, store=check_store_name(name))
        content = self._fetch(name, self.deadline(timeout_s), newer_than=newer_than, destination=destination)
        return None if content is None else content.version

    def _fill_new(
        self,
        name: str,
        captured: Captured,
        td: Any,
        deadline: Deadline,
        *,
        exists_ok: bool,
        share_non_tensor: bool,
        max_object_bytes: int | None,
        durability: Durability | None,
    ) -> int:
        blank = without_content(captured, store=name)
        captured = blank or captured
        request = control_pb2.CreateStoreRequest(
            name=name,
            kind=control_pb2.STORE_KIND_TENSORDICT,
            spec=codec.encode(captured.spec),
            loading=blank is None,
            share_non_tensor=share_non_tensor,
            max_object_bytes=check_max_object_bytes(max_object_bytes),
            durability=check_durability(durability),
        )

        if blank is not None:
            request.exists_ok = exists_ok
            return self._make_blank(request, blank, deadline)

        def create(session: Session) -> None:
            is_first = not request.session
            request.session = session.welcome.session
            try:
                self._call("CreateStore", request, timeout_s=deadline.remaining_s)
            except StoreExistsError:
                if is_first:
                    raise
                # Else an earlier session may have created it: then the write is known to the server, and is answered.

        try:
            return write_selection(
                self,
                name,
                _EVERYTHING,
                captured,
                stored=captured.spec,
                create=create,
                deadline=deadline,
            )
        except StoreExistsError:
            if not exists_ok:
                raise
            if request.durability or request.max_object_bytes:
                check_storage(self.describe_existing(name, deadline), request)
            return self._replace(name, captured, td, deadline=deadline)

    def _make_blank(self, request: control_pb2.CreateStoreRequest, captured: Captured, deadline: Deadline) -> int:
        """Creates a store of meta tensors; only its non-tensor values are written."""
        stored = captured.spec
        try:
            description, _ = self._create(request, stored, deadline.remaining_s)
        except StoreExistsError:
            if not request.exists_ok:
                raise
            description = self.describe_existing(request.name, deadline)  # it may have the same structure, but content
            check_storage(description, request)
            stored = description.spec
            check_matches(stored, captured.spec, store=request.name)
        keys = [path for path, _ in captured.spec.values]
        if not keys:
            return description.version
        content = captured._replace(spec=captured.spec.select(keys))
        return write_selection(self, request.name, _EVERYTHING, content, keys=keys, stored=stored, deadline=deadline)

    def _show_content(self, name: str, content: Content, device: Any, pad: Pad) -> Any:
        """Builds what was read of a store; live if the store shares its non-tensor leaves."""
        td = content.build(device, pad)
        if not content.spec.values:
            return td
        handle = self._handle(self.describe(name))
        if not isinstance(handle, StoreHandle) or not handle.shares_non_tensor:
            return td
        return with_live_leaves(td, handle)

    def _handle(self, description: StoreDescription) -> StoreHandle | ReplayHandle | QueueHandle:
        if description.kind == "replay":
            is_queue = Settings.from_json(description.settings).is_queue
            return QueueHandle(self, description) if is_queue else ReplayHandle(self, description)
        if description.kind == "weights":
            state = f"store {description.name!r} holds weights"
            raise WrongStateError(state=state, event="a handle (latest() pulls them)")
        return StoreHandle(self, description)

    def _create(
        self, request: control_pb2.CreateStoreRequest, spec: Spec, timeout_s: float | None
    ) -> tuple[StoreDescription, bool]:
        response = self._change("CreateStore", request, timeout_s=self.deadline(timeout_s).remaining_s)
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
        device: Any = None,
        allow_pickle: bool | None = None,
    ) -> Content | None:
        check_real("reading a store")
        return read_selection(
            self,
            check_store_name(name),
            _EVERYTHING,
            keys=keys,
            newer_than=newer_than,
            deadline=deadline,
            destination=destination,
            device=device,
            allow_pickle=allow_pickle,
        )

    def _replace(self, name: str, captured: Captured, td: Any, *, deadline: Deadline) -> int:
        while True:
            try:
                return self._replace_known(name, captured, td, deadline=deadline)
            except StructureChangedError:  # the structure has changed since it was requested
                deadline.raise_if_expired(f"a write to {name!r}, whose keys others keep changing")

    def _replace_known(self, name: str, captured: Captured, td: Any, *, deadline: Deadline) -> int:
        handle = self._handle(self.describe_existing(name, deadline))
        if not isinstance(handle, StoreHandle):
            raise WrongStateError(state=f"store {name!r} is a replay", event="send()")
        if handle.spec.has_ragged or captured.spec.has_ragged:
            like = handle.spec
            captured = capture(td, store=name, allow_pickle=self.allow_pickle, like=like, is_exact=True)
        check_matches(handle.spec, captured.spec, store=name)
        return write_selection(self, name, _EVERYTHING, captured, stored=handle.spec, deadline=deadline)
