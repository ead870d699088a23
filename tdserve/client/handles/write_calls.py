"""The in-place methods that are one write, and read nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tensordict import NonTensorData

from tdserve.base.deadline import Deadline
from tdserve.base.errors import SpecMismatchError
from tdserve.client.content.outer_modes import leave_modes_in_calls
from tdserve.client.content.ragged_values import describe_value
from tdserve.client.handles.coerce import is_number
from tdserve.client.handles.key_paths import check_path
from tdserve.client.handles.local_values import keep_keys, to_local
from tdserve.client.handles.view_calls import ViewCalls
from tdserve.structure.trees.tree import Path, ValueLeaf, show

if TYPE_CHECKING:
    from typing_extensions import Self


@leave_modes_in_calls
class WriteCalls(ViewCalls):
    """These methods, of handles and views. Each returns the handle or view."""

    def set_at_(
        self,
        key: str | Path,
        value: Any,
        index: Any,
        *,
        timeout_s: float | None = None,
        return_early: bool = False,
    ) -> Any:
        """Writes rows of a leaf or nested part; a tensor is broadcast as by ``leaf[index] = value``.

        Args:
            return_early: True returns a future at once. ``value`` and ``index`` must not change before it is done.
                Several writes under way at once may finish in any order.

        Returns:
            This handle or view, or a future of it.
        """
        path, deadline = check_path(key), self._store.make_deadline(timeout_s)
        write = self._prepare_write_of_rows(path, value, index, deadline)
        return self._store.perform_write(write, deadline, return_early)

    def _prepare_write_of_rows(self, path: Path, value: Any, index: Any, deadline: Deadline) -> Callable[[], Any]:
        """Prepares the write of ``set_at_``, and checks at once what can be checked without the server."""
        raise NotImplementedError

    def update_(
        self,
        values: Any,
        clone: bool = False,
        *,
        non_blocking: bool = False,
        keys_to_update: Sequence[str | Path] | None = None,
        timeout_s: float | None = None,
    ) -> Self:
        """Replaces all leaves that ``values`` has, in one write.

        Args:
            values: Tensordict, tensorclass instance, dict, or another store.
            clone, non_blocking: Accepted as in tensordict; what is written is a copy in any case.
            keys_to_update: Only these, if ``values`` has them.

        Raises:
            KeyNotFoundError: The store lacks one of them; ``update`` adds keys. Nothing was written.
        """
        deadline = self._store.make_deadline(timeout_s)
        self._update(keep_keys(values, keys_to_update, deadline), deadline)
        return self

    def update_at_(
        self,
        values: Any,
        index: Any,
        clone: bool = False,
        *,
        non_blocking: bool = False,
        keys_to_update: Sequence[str | Path] | None = None,
        timeout_s: float | None = None,
    ) -> Self:
        """Writes rows of all leaves that ``values`` has, in one write, as ``store[index] = values`` does.

        Arguments as in ``update_``.
        """
        deadline = self._store.make_deadline(timeout_s)
        self._update_at(keep_keys(values, keys_to_update, deadline), index, deadline)
        return self

    def fill_(self, key: str | Path, value: Any, *, timeout_s: float | None = None) -> Any:
        """Fills a leaf or a nested part with one number, with one write."""
        self._check_number(value, key)
        path, deadline = check_path(key), self._store.make_deadline(timeout_s)
        entry = self._store.retry(lambda: self.spec.find(path, store=self.name), deadline)
        if isinstance(entry, ValueLeaf) and entry.ragged is None:  # a value leaf takes no number
            return self
        return self._prepare_write_of_rows(path, value, ..., deadline)()

    def set_non_tensor(self, key: str | Path, value: Any, *, timeout_s: float | None = None) -> Any:
        """Sets one value for all rows of a non-tensor leaf, with one write."""
        wrapped = NonTensorData(value, batch_size=self._get_skeleton().td.batch_size)
        return self.set_at_(key, wrapped, ..., timeout_s=timeout_s)

    def copy_(self, tensordict: Any, non_blocking: bool = False, *, timeout_s: float | None = None) -> Self:
        """Does the same as ``update_``."""
        return self.update_(tensordict, timeout_s=timeout_s)

    def copy_at_(
        self,
        tensordict: Any,
        idx: Any,
        non_blocking: bool = False,
        *,
        fast: bool = True,
        timeout_s: float | None = None,
    ) -> Self:
        """Does the same as ``update_at_``."""
        deadline = self._store.make_deadline(timeout_s)
        self._update_at(to_local(tensordict, deadline), idx, deadline)
        return self

    def _check_number(self, value: Any, key: str | Path) -> None:
        if not is_number(value):
            path = show(check_path(key)) if key else ""
            raise SpecMismatchError(store=self.name, key=path, expected="a number", actual=describe_value(value))
