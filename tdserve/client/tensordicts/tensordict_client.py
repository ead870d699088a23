"""The calls of a client on tensordict stores: tensordict's own, with a store's name in place of a rank or a path."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from tdserve.base.deadline import Deadline
from tdserve.base.errors import NotSupportedError, WrongStateError
from tdserve.base.ids import check_store_name
from tdserve.base.integers import check_version
from tdserve.client.content.outer_modes import leave_modes_in_calls
from tdserve.client.content.padding import Pad
from tdserve.client.content.read_content import Destination, drop_extra
from tdserve.client.handles.handle import StoreHandle
from tdserve.client.handles.local_values import to_local
from tdserve.client.handles.tensordict_calls import TensorDictCalls
from tdserve.client.session.by_address import OfProcess
from tdserve.client.session.session_client import SessionClient
from tdserve.client.session.store_options import StoreOptions
from tdserve.client.tensordicts.loading import Loading, ShownStores
from tdserve.client.tensordicts.memmap_arguments import check_no_archive, check_no_files
from tdserve.client.tensordicts.new_tensordict import NewStore, NewZeros, adopt_folder, replace_content
from tdserve.client.tensordicts.reading import show_content
from tdserve.client.transfers.read_selection import read_selection, require_content
from tdserve.rules.catalog import Durability
from tdserve.rules.placement import Shards, check_one_shard
from tdserve.structure.captures.capture import capture
from tdserve.structure.captures.declaring import Declared
from tdserve.structure.tensordicts.views import check_own_entries
from tdserve.structure.trees.tree import Path


@leave_modes_in_calls
class TensorDictClient(SessionClient):
    """A client with tensordict's ``init_remote`` and ``send``, and with its memmap family.

    Every call with ``exists_ok`` accepts tensordict's spelling ``existsok`` too. The default is False, unlike
    tensordict's: nothing is overwritten without an error. ``return_early=True`` returns a future of the result at once;
    the tensordict must not change before it is done.

    The calls of the memmap family take tensordict's arguments in tensordict's order. Arguments that only matter for
    local files have no effect: ``num_threads`` (the server has threads of its own), ``robust_key`` (keys of all kinds
    are stored under safe names), ``atomic`` (a store always becomes visible, and is replaced, as a whole),
    ``non_blocking`` (work on a GPU waits for the content there).

    ``copy_existing`` decides about leaves that are memory-mapped to files already. A store has files of its own, so
    None, the default, and True copy them; False raises WrongStateError, as in tensordict.

    ``archive`` and ``compression`` raise NotSupportedError: a store is not an archive.
    """

    _shows = OfProcess(lambda _: ShownStores())

    def init_remote(
        self,
        td: Any,
        name: str,
        *,
        batch_size: Sequence[int] | int | None = None,
        exists_ok: bool = False,
        existsok: bool = False,
        share_non_tensor: bool = False,
        max_object_bytes: int | None = None,
        durability: Durability | None = None,
        checksum: bool = False,
        timeout_s: float | None = None,
        return_early: bool = False,
    ) -> Any:
        """Creates a store from a tensordict: first the structure, then the content. It becomes visible as a whole.

        Args:
            td: TensorDict or tensorclass instance. The file of a PersistentTensorDict is read while it is sent, and the
                store reads as a TensorDict. Of meta and fake tensors only the structure is stored: the store reads as
                meta tensors until it is first written, and then as its content, with zeros where nothing was written.
            name: Name of the store.
            batch_size: Batch size of a dict of arrays, as in ``TensorDict``; None is ``[]``. A tensordict has its own.
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
            checksum: As in ``create_replay``; a read of any part of a row compares the whole row.

        Returns:
            The store's content version, or a future of it.

        Raises:
            StoreExistsError: The name is taken (with ``exists_ok``: by another structure). Nothing was written.
            NotSupportedError: A leaf cannot be stored; the error names its key. Nothing was created.
            CapacityError: The server's disk has no room. Nothing was created.
        """
        options = StoreOptions(exists_ok or existsok, max_object_bytes, durability, share_non_tensor, checksum)
        new = NewStore(self, name, td, options, batch_size)
        deadline = self.make_deadline(timeout_s)
        return self.perform(lambda: new.fill(deadline), deadline, return_early)

    def from_remote_init(
        self,
        name: str,
        *,
        device: Any = None,
        keys: Sequence[str | Path] | None = None,
        out: Any = None,
        pad: Pad = None,
        numpy: bool | None = None,
        timeout_s: float | None = None,
        return_early: bool = False,
    ) -> Any:
        """Builds a matching tensordict, fills it, and returns it or a future of it.

        Args:
            name: Name of the store; waits for it if it does not exist yet.
            device: Where the tensors are moved; None leaves them on the CPU.
            keys: Leaves or nested parts to fetch; None is all.
            out: Filled instead of a new tensordict; must fit.
            pad: Pads ragged tensors to the longest of them with this number (or numbers by key), and adds masks of the
                content under ``("masks", *key)``; None leaves them ragged.
            numpy: True returns a dict of NumPy arrays, unless ``out`` is given; None is the client's setting.

        Raises:
            StoreNotFoundError: It does not exist, with ``timeout_s=0``.
            DeadlineExceededError: The store was not created in time.
            SpecMismatchError: ``out`` does not fit; nothing was written to it.
        """
        paths = [(key,) if isinstance(key, str) else tuple(key) for key in keys or ()]
        destination = None if out is None else Destination(out, store=check_store_name(name))
        deadline = self.make_deadline(timeout_s)

        def read() -> Any:
            content = require_content(
                read_selection(
                    self, check_store_name(name), deadline=deadline, keys=paths, destination=destination, device=device
                )
            )
            if out is not None:
                return out
            found = drop_extra(show_content(self, name, content, device, pad, deadline), paths, content.spec)
            return self.hand_over(found, numpy, device)

        return self.perform(read, deadline, return_early)

    def send(self, td: Any, name: str, *, timeout_s: float | None = None, return_early: bool = False) -> Any:
        """Replaces a store's content as a whole; returns the content version of the write, or a future of it.

        A client's calls take effect in their order: one waits for earlier ones that return early.

        Raises:
            StoreNotFoundError: There is no such store; ``init_remote`` creates one.
            SpecMismatchError: The tensordict does not fit. Nothing was written.
        """
        check_store_name(name)
        # A dict is read for the structure of the store.
        captured = None if isinstance(td, dict) else capture(td, store=name, allow_pickle=self.allow_pickle)
        deadline = self.make_deadline(timeout_s)
        return self.perform_in_turn(
            name, lambda: replace_content(self, name, captured, td, deadline), deadline, return_early
        )

    def recv(self, td: Any, name: str, *, newer_than: int | None = None, timeout_s: float | None = None) -> int | None:
        """Fills a tensordict in place with a store's content.

        Args:
            td: A tensordict of the store's structure.
            newer_than: Waits for a content version above this one. Nothing is queued: of several versions that are
                written meanwhile only the newest is read.

        Returns:
            The content version, or None when ``timeout_s=0`` and there is nothing newer.
        """
        newer_than = None if newer_than is None else check_version("newer_than", newer_than)
        destination = Destination(td, store=check_store_name(name))
        content = read_selection(
            self, name, newer_than=newer_than, deadline=self.make_deadline(timeout_s), destination=destination
        )
        return None if content is None else content.version

    def memmap(
        self,
        td: Any,
        name: str,
        copy_existing: bool | None = None,
        *,
        batch_size: Sequence[int] | int | None = None,
        shards: Shards = 1,
        num_threads: int = 0,
        return_early: bool = False,
        share_non_tensor: bool = False,
        exists_ok: bool = False,
        existsok: bool = False,
        robust_key: bool | None = True,
        archive: bool | None = None,
        compression: str | int | None = None,
        atomic: bool = False,
        max_object_bytes: int | None = None,
        durability: Durability | None = None,
        checksum: bool = False,
        timeout_s: float | None = None,
    ) -> Any:
        """Creates a store from a tensordict as ``init_remote`` does, and returns its handle, or a future of it.

        The handle or view of another store is read, and its content stored.

        Args:
            shards: 1 or ``"all"``; the client of several servers divides the rows among more.
        """
        check_one_shard(shards)
        check_no_archive(archive, compression)
        deadline = self.make_deadline(timeout_s)
        if isinstance(td, TensorDictCalls):
            td = to_local(td, deadline)
        options = StoreOptions(exists_ok or existsok, max_object_bytes, durability, share_non_tensor, checksum)
        make = self._prepare_memmap(td, name, copy_existing, options, deadline, batch_size)
        return self.perform(make, deadline, return_early)

    def _prepare_memmap(
        self,
        td: Any,
        name: str,
        copy_existing: bool | None,
        options: StoreOptions,
        deadline: Deadline,
        batch_size: Sequence[int] | int | None = None,
    ) -> Callable[[], StoreHandle]:
        """Prepares the creation of a store, and checks at once what can be checked without the server."""
        if copy_existing is False and not isinstance(td, dict):
            check_no_files(td)
        new = NewStore(self, name, td, options, batch_size)

        def make() -> StoreHandle:
            new.fill(deadline)
            return StoreHandle(self, self.catalog.describe_existing(name, deadline))

        return make

    save = memmap

    dumps = memmap

    def memmap_(
        self,
        td: Any,
        name: str,
        copy_existing: bool | None = None,
        *,
        num_threads: int = 0,
        return_early: bool = False,
        share_non_tensor: bool = False,
        exists_ok: bool = False,
        existsok: bool = False,
        robust_key: bool | None = True,
        atomic: bool = False,
        max_object_bytes: int | None = None,
        durability: Durability | None = None,
        checksum: bool = False,
        timeout_s: float | None = None,
    ) -> Any:
        """Creates a store as ``memmap`` does, but returns the tensordict itself, locked, or a future of it.

        From then on it shows what the store holds. If the client shares memory with the server, its tensors are the
        store's memory, as in ``StoreHandle.map``; if the store was created with ``share_non_tensor=True``, its
        non-tensor leaves are live. ``memmap_refresh_`` updates the rest. Writes into its tensors stay in this process.

        Raises:
            NotSupportedError: It has no entries of its own that could show a store (a sub-tensordict, a lazy view, an
                HDF5 file, a handle), or is part of a locked tensordict. Nothing was created; ``memmap`` stores such
                tensordicts.
        """
        advice = f"memmap() stores it, and client.load_memmap({name!r}) returns what the store holds"
        if isinstance(td, (TensorDictCalls, dict)):
            what = "dict, which cannot be locked" if isinstance(td, dict) else "handle, whose entries are elsewhere"
            raise NotSupportedError(feature=f"memmap_() of a {what},", reason=advice)
        check_own_entries(td, call="memmap_()", advice=advice)
        deadline = self.make_deadline(timeout_s)

        def share() -> Any:
            options = StoreOptions(exists_ok or existsok, max_object_bytes, durability, share_non_tensor, checksum)
            handle = self._prepare_memmap(td, name, copy_existing, options, deadline)()
            return self._shows.show(self, td, handle, deadline)

        return self.perform(share, deadline, return_early)

    def memmap_like(
        self,
        like: Any,
        name: str,
        copy_existing: bool | None = None,
        *,
        batch_size: Sequence[int] | int = (),
        shards: Shards = 1,
        ragged: Declared = None,
        exists_ok: bool = False,
        existsok: bool = False,
        num_threads: int = 0,
        return_early: bool = False,
        share_non_tensor: bool = False,
        robust_key: bool | None = True,
        archive: bool | None = None,
        max_object_bytes: int | None = None,
        durability: Durability | None = None,
        checksum: bool = False,
        timeout_s: float | None = None,
    ) -> Any:
        """Creates a store of zeros with the structure of ``like``; returns its handle, or a future of it.

        Args:
            like: TensorDict or tensorclass instance, also of meta or fake tensors. Only non-tensor values of its
                content are stored. Rows of lazy stacks keep their sizes and keys.
            copy_existing: No effect, as in tensordict: no tensor is copied.
            batch_size: Dimensions that precede ``like``'s own; a number is a single one.
            ragged: What differs from row to row, as in ``create_replay``; empty at first.
            shards: As in ``memmap``.
            exists_ok: True returns an existing store of the same structure.
            share_non_tensor, max_object_bytes, durability, checksum: As in ``init_remote``.

        Raises:
            StoreExistsError, NotSupportedError, CapacityError: Nothing was created.
        """
        check_one_shard(shards)
        check_no_archive(archive, None)
        options = StoreOptions(exists_ok or existsok, max_object_bytes, durability, share_non_tensor, checksum)
        new = NewZeros(self, name, like, options, batch_size, ragged)
        deadline = self.make_deadline(timeout_s)
        return self.perform(lambda: new.make(deadline), deadline, return_early)

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
            path: Path of the folder on the server's machine; a relative path starts at this process's current folder.
            name: Name of the store.
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
        deadline = self.make_deadline(timeout_s)
        adopt_folder(self, path, name, read_only=read_only, exists_ok=exists_ok or existsok, deadline=deadline)
        return StoreHandle(self, self.catalog.describe_existing(name, deadline))

    def load_memmap(
        self,
        name: str,
        device: Any = None,
        non_blocking: bool = False,
        *,
        out: Any = None,
        robust_key: bool | None = True,
        subpath: Any = None,
        mode: str | None = None,
        num_threads: int = 0,
        allow_pickle: bool | None = None,
        pad: Pad = None,
        timeout_s: float | None = None,
        return_early: bool = False,
    ) -> Any:
        """Reads the content of a store into a local tensordict, or returns a future of it.

        With ``device="meta"``, and under a ``FakeTensorMode``, it has meta or fake tensors. Then only non-tensor values
        are fetched, and ragged tensors, whose sizes are unknown without their content.

        Args:
            name: Name of the store; waits for it if it does not exist yet. ``"store/part"`` names a nested tensordict,
                as ``subpath`` does.
            device: Where the tensors are moved; None leaves them on the CPU.
            out: Receives the content in place if it fits. Otherwise its leaves are replaced, and keys that the store
                lacks are removed, as in tensordict. If it has a device, the content goes there.
            subpath: Path of a nested tensordict, which alone is read and returned: a key, or parts joined by ``"/"``.
            mode: ``"r"`` and None return a copy. ``"r+"`` returns the store's memory, as in
                ``StoreHandle.map(writable=True)``, and needs the transport shm.
            allow_pickle: Whether pickled values are unpickled; None: as set for the client.
            pad: Pads ragged tensors, as in ``from_remote_init``.

        Raises:
            StoreNotFoundError: It does not exist, with ``timeout_s=0``.
            DeadlineExceededError: The store was not created in time.
            InvalidRequestError: There is not a tensordict at ``subpath``, ``mode`` is unknown, ``out`` is not a
                tensordict, or ``device`` differs from that of ``out``.
            SpecMismatchError: ``out`` is of another kind (a tensorclass, a lazy stack). Nothing was written to it.
            NotSupportedError: With ``mode="r+"``: this client may not write to the server's memory.
        """
        deadline = self.make_deadline(timeout_s)
        loading = Loading(self, name, deadline, device, out, subpath, mode, allow_pickle, pad)
        return self.perform(loading.load, deadline, return_early)

    load = load_memmap

    def load_memmap_(
        self,
        td: Any,
        name: str,
        robust_key: bool | None = True,
        *,
        allow_pickle: bool | None = None,
        mode: str | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        """Fills a tensordict with what a store holds, and returns it; as ``load_memmap`` with ``out=td``.

        A tensordict from ``memmap_`` shows this store from then on, instead of its former one.
        """
        if isinstance(td, StoreHandle):
            return td.load_memmap_(name, allow_pickle=allow_pickle, timeout_s=timeout_s)
        if self._shows.find_name(td) is None:
            return self.load_memmap(name, out=td, allow_pickle=allow_pickle, mode=mode, timeout_s=timeout_s)
        return self._shows.load(self, td, name, self.make_deadline(timeout_s), allow_pickle=allow_pickle, mode=mode)

    load_ = load_memmap_

    def memmap_refresh_(self, td: Any, *, allow_pickle: bool | None = None, timeout_s: float | None = None) -> Any:
        """Makes a tensordict from ``memmap_`` show what its store holds now, including new keys; returns it, locked.

        If the client shares memory with the server its tensors show that anyway, until the store is created again, or
        gets new keys.

        Raises:
            WrongStateError: The tensordict shows no store; ``load_memmap_`` accepts a name.
            StoreNotFoundError: The store was deleted. The tensordict is unchanged.
        """
        if isinstance(td, StoreHandle):
            return td.memmap_refresh_(timeout_s=timeout_s)
        name = self._shows.find_name(td)
        if name is None:
            state = "the tensordict was not returned by memmap_() of this client (load_memmap_() takes a name)"
            raise WrongStateError(state=state, event="memmap_refresh_()")
        return self.load_memmap_(td, name, allow_pickle=allow_pickle, timeout_s=timeout_s)
