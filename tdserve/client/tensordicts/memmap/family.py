"""tensordict's memmap family on a client, with a store's name in place of the path."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tdserve.base.errors import NotSupportedError
from tdserve.base.ids import check_store_name
from tdserve.client.handles.handle import StoreHandle
from tdserve.client.handles.live_values import show_stored
from tdserve.client.handles.tensordict_calls import TensorDictCalls
from tdserve.client.tensordicts.memmap.arguments import check_no_archive, check_no_files, check_sizes
from tdserve.client.tensordicts.memmap.loading import LoadingClient
from tdserve.client.transfers.write import write_selection
from tdserve.messages.selection.selection import Selection
from tdserve.rules.catalog import Durability, check_durability, check_max_object_bytes
from tdserve.structure import codec
from tdserve.structure.capture import Captured, capture
from tdserve.structure.declaring import Declared, declare_ragged, first_values, list_declared_paths, zeros_of
from tdserve.structure.fake_tensors import structure_of
from tdserve.structure.tree import Path
from tdserve.structure.views import check_own_entries
from tdserve.v1 import control_pb2

_EVERYTHING = Selection()


class MemmapClient(LoadingClient):
    """A client with tensordict's calls that save.

    The calls take tensordict's arguments in tensordict's order. Arguments that only matter for local files have no
    effect: ``num_threads`` (the server has threads of its own), ``robust_key`` (keys of all kinds are stored under safe
    names), ``atomic`` (a store always becomes visible, and is replaced, as a whole).

    ``copy_existing`` decides about leaves that are memory-mapped to files already. A store has files of its own, so
    None, the default, and True copy them; False raises WrongStateError, as in tensordict.

    ``archive`` and ``compression`` raise NotSupportedError: a store is not an archive.
    """

    def memmap(
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
        archive: bool | None = None,
        compression: str | int | None = None,
        atomic: bool = False,
        max_object_bytes: int | None = None,
        durability: Durability | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        """Creates a store from a tensordict as ``init_remote`` does, and returns its handle, or a future of it.

        The handle or view of another store is read, and its content stored.
        """
        check_no_archive(archive, compression)
        if isinstance(td, TensorDictCalls):
            td = td.to_tensordict(timeout_s=timeout_s)
        if copy_existing is False:
            check_no_files(td)
        captured = capture(
            td, store=check_store_name(name), allow_pickle=self.allow_pickle, is_exact=True, takes_structure=True
        )
        deadline = self.deadline(timeout_s)

        def make() -> StoreHandle:
            self._fill_new(
                name,
                captured,
                td,
                deadline,
                exists_ok=exists_ok or existsok,
                share_non_tensor=share_non_tensor,
                max_object_bytes=max_object_bytes,
                durability=durability,
            )
            return StoreHandle(self, self.describe_existing(name, deadline))

        return self.perform(make, return_early)

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
        timeout_s: float | None = None,
    ) -> Any:
        """Creates a store as ``memmap`` does, but returns the tensordict itself, locked, or a future of it.

        From then on it shows what the store holds. If the client shares memory with the server, its tensors are the
        store's memory, as of ``StoreHandle.map``; if the store was created with ``share_non_tensor=True``, its
        non-tensor leaves are live. ``memmap_refresh_`` updates the rest. Writes into its tensors stay in this process.

        Raises:
            NotSupportedError: It has no entries of its own that could show a store (a sub-tensordict, a lazy view, an
                HDF5 file, a handle), or is part of a locked tensordict. Nothing was created; ``memmap`` stores such
                tensordicts.
        """
        advice = f"memmap() stores it, and client.load_memmap({name!r}) returns what the store holds"
        if isinstance(td, TensorDictCalls):
            raise NotSupportedError(
                feature="memmap_() of a handle", reason=f"its entries are stored elsewhere: {advice}"
            )
        check_own_entries(td, call="memmap_()", advice=advice)

        def share() -> Any:
            handle = self.memmap(
                td,
                name,
                copy_existing,
                share_non_tensor=share_non_tensor,
                exists_ok=exists_ok or existsok,
                max_object_bytes=max_object_bytes,
                durability=durability,
                timeout_s=timeout_s,
            )
            try:
                mapped = handle.map()
            except NotSupportedError:
                mapped = None
            shown = show_stored(td, handle, mapped=mapped, is_live=handle.shares_non_tensor)
            self._shows.add(shown, name)
            return shown

        return self.perform(share, return_early)

    def memmap_like(
        self,
        like: Any,
        name: str,
        copy_existing: bool | None = None,
        *,
        batch_size: Sequence[int] | int = (),
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
        timeout_s: float | None = None,
    ) -> Any:
        """Creates a store of zeros with the structure of ``like``; returns its handle, or a future of it.

        Args:
            like: TensorDict or tensorclass instance, also of meta or fake tensors. Only non-tensor values of its
                content are stored. Rows of lazy stacks keep their sizes and keys.
            copy_existing: No effect, as in tensordict: no tensor is copied.
            batch_size: Dimensions that precede ``like``'s own; a number is a single one.
            ragged: What differs from row to row, as in ``create_replay``; empty at first.
            exists_ok: True returns an existing store of the same structure.
            share_non_tensor, max_object_bytes, durability: As in ``init_remote``.

        Raises:
            StoreExistsError, NotSupportedError, CapacityError: Nothing was created.
        """
        check_no_archive(archive, None)
        captured = structure_of(capture(like, store=name, allow_pickle=self.allow_pickle, takes_structure=True))
        sizes = check_sizes(batch_size)
        has_rows = bool(sizes) or ragged is not None  # else it is no row, from which others may differ
        row = declare_ragged(captured.spec, captured.values, ragged, store=name) if has_rows else captured.spec
        known = list_declared_paths(captured.spec, captured.values, ragged) if has_rows else set()
        zeros: dict[Path, Any] = {}
        if any(leaf.ragged is not None and path not in known for path, leaf in row.values):
            blank = capture(zeros_of(like), store=name, like=row, allow_pickle=self.allow_pickle).values
            zeros = {path: blank[path] for path, leaf in row.values if leaf.ragged is not None and path not in known}
        spec = row.prepend(sizes) if sizes else row
        request = control_pb2.CreateStoreRequest(
            name=check_store_name(name),
            kind=control_pb2.STORE_KIND_TENSORDICT,
            spec=codec.encode(spec),
            exists_ok=exists_ok or existsok,
            share_non_tensor=share_non_tensor,
            max_object_bytes=check_max_object_bytes(max_object_bytes),
            durability=check_durability(durability),
        )
        deadline = self.deadline(timeout_s)

        def make() -> StoreHandle:
            description, created = self._create(request, spec, deadline.remaining_s)
            if spec.values and created and 0 not in sizes:
                keys = [path for path, _ in spec.values]
                values_only, values = first_values(spec.select(keys), captured.values, sizes, zeros)
                content = Captured(values_only, {}, values, {})
                write_selection(self, request.name, _EVERYTHING, content, keys=keys, stored=spec, deadline=deadline)
            return StoreHandle(self, description)

        return self.perform(make, return_early)
