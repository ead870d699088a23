"""tensordict's memmap family on a client, with a store's name in place of the path."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tdserve.catalog import checked_max_object_bytes
from tdserve.client.handle import StoreHandle
from tdserve.client.live import show_stored
from tdserve.client.padding import Pad
from tdserve.client.tensordicts import TensorDictClient
from tdserve.client.writing import write_selection
from tdserve.errors import InvalidRequestError, NotSupportedError
from tdserve.ids import check_store_name
from tdserve.selection import Selection
from tdserve.spec import codec
from tdserve.spec.capture import Captured, capture
from tdserve.spec.declaring import Declared, declared, first_values
from tdserve.v1 import control_pb2

_EVERYTHING = Selection()


class MemmapClient(TensorDictClient):
    """Adds the memmap family."""

    def memmap(
        self,
        td: Any,
        name: str,
        *,
        exists_ok: bool = False,
        existsok: bool = False,
        timeout_s: float | None = None,
        return_early: bool = False,
        share_non_tensor: bool = False,
        max_object_bytes: int | None = None,
    ) -> Any:
        """Creates a store from a tensordict as ``init_remote`` does, and returns its handle, or a future of it."""
        captured = capture(td, store=check_store_name(name), allow_pickle=self.allow_pickle, is_exact=True)
        deadline = self.deadline(timeout_s)

        def fill() -> StoreHandle:
            may_exist = exists_ok or existsok
            self._fill_new(
                name,
                captured,
                td,
                deadline,
                exists_ok=may_exist,
                share_non_tensor=share_non_tensor,
                max_object_bytes=max_object_bytes,
            )
            return StoreHandle(self, self.describe(name))

        return self.perform(fill, return_early)

    def memmap_(self, td: Any, name: str, *, return_early: bool = False, **options: Any) -> Any:
        """As ``memmap``, with its arguments, but returns the tensordict itself, locked, or a future of it.

        From then on it shows what the store holds: its tensors are the store's memory, as of ``StoreHandle.map``, where
        the client shares memory with the server, and of a store made with ``share_non_tensor=True`` its non-tensor
        leaves are live. What is written into its tensors stays in this process.
        """

        def share() -> Any:
            handle = self.memmap(td, name, **options)
            try:
                mapped = handle.map()
            except NotSupportedError:
                mapped = None
            return show_stored(td, handle, mapped=mapped, is_live=handle.shares_non_tensor)

        return self.perform(share, return_early)

    def memmap_like(
        self,
        like: Any,
        name: str,
        *,
        batch_size: Sequence[int] = (),
        ragged: Declared = None,
        exists_ok: bool = False,
        existsok: bool = False,
        share_non_tensor: bool = False,
        max_object_bytes: int | None = None,
        timeout_s: float | None = None,
    ) -> StoreHandle:
        """Creates a store of zeros with the structure of ``like``.

        Args:
            like: TensorDict or tensorclass instance; its content does not matter, but for non-tensor values, which are
                kept.
            batch_size: Dimensions put in front of ``like``'s own.
            ragged: What differs from row to row, as in ``create_replay``; empty at first.
            exists_ok: True returns an existing store of the same structure.
            share_non_tensor, max_object_bytes: As in ``init_remote``.

        Raises:
            StoreExistsError, NotSupportedError, CapacityError: Nothing was created.
        """
        captured = capture(like, store=name, allow_pickle=self.allow_pickle)
        sizes = tuple(batch_size)
        if any(isinstance(size, bool) or not isinstance(size, int) or size < 0 for size in sizes):
            raise InvalidRequestError(
                argument="batch_size", reason=f"{list(sizes)} has a size that is no natural number"
            )
        row = declared(captured.spec, captured.values, ragged, store=name)
        spec = row.prepend(sizes) if sizes else row
        description, created = self._create(
            control_pb2.CreateStoreRequest(
                name=check_store_name(name),
                kind=control_pb2.STORE_KIND_TENSORDICT,
                spec=codec.encode(spec),
                exists_ok=exists_ok or existsok,
                share_non_tensor=share_non_tensor,
                max_object_bytes=checked_max_object_bytes(max_object_bytes),
            ),
            spec,
            timeout_s,
        )
        handle = StoreHandle(self, description)
        if spec.values and created and 0 not in sizes:
            keys = [path for path, _ in spec.values]
            values_only, values = first_values(spec.select(keys), captured.values, sizes)
            content = Captured(values_only, {}, values, {})
            write_selection(
                self,
                name,
                _EVERYTHING,
                content,
                keys=keys,
                stored=spec,
                deadline=self.deadline(timeout_s),
            )
        return handle

    def load_memmap(
        self, name: str, *, device: Any = None, out: Any = None, pad: Pad = None, timeout_s: float | None = None
    ) -> Any:
        """The content of a store as a local tensordict; as ``from_remote_init``."""
        return self.from_remote_init(name, device=device, out=out, pad=pad, timeout_s=timeout_s)
