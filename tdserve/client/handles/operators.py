"""Python's operators for stores and views: each performs tensordict's own on a copy."""

from __future__ import annotations

from typing import Any

from tdserve.base.errors import NotSupportedError


class Operators:
    """Operators that all follow one rule; a subclass defines how an operation is performed.

    ``==`` and the other comparisons compare element by element, as for tensordicts. As keys of a dict or members of a
    set, two objects are equal only if they are identical.
    """

    def _operate(self, name: str, *args: Any) -> Any:
        """Performs a special method of tensordict on a copy of the content."""
        raise NotImplementedError

    def _rewrite(self, name: str, *args: Any) -> Any:
        """Performs a special method in place, on a copy that is written back."""
        raise NotImplementedError

    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        raise NotSupportedError(
            feature="the truth value of a store",
            reason="use len(store.keys()) to test for keys, is_empty() for leaves, (a == b).all() to compare",
        )

    def __eq__(self, other: object) -> Any:
        return self._operate("__eq__", other)

    def __ne__(self, other: object) -> Any:
        return self._operate("__ne__", other)

    def __lt__(self, other: Any) -> Any:
        return self._operate("__lt__", other)

    def __le__(self, other: Any) -> Any:
        return self._operate("__le__", other)

    def __gt__(self, other: Any) -> Any:
        return self._operate("__gt__", other)

    def __ge__(self, other: Any) -> Any:
        return self._operate("__ge__", other)

    def __abs__(self) -> Any:
        return self._operate("__abs__")

    def __neg__(self) -> Any:
        return self._operate("__neg__")

    def __invert__(self) -> Any:
        return self._operate("__invert__")

    def __add__(self, other: Any) -> Any:
        return self._operate("__add__", other)

    def __radd__(self, other: Any) -> Any:
        return self._operate("__radd__", other)

    def __sub__(self, other: Any) -> Any:
        return self._operate("__sub__", other)

    def __rsub__(self, other: Any) -> Any:
        return self._operate("__rsub__", other)

    def __mul__(self, other: Any) -> Any:
        return self._operate("__mul__", other)

    def __rmul__(self, other: Any) -> Any:
        return self._operate("__rmul__", other)

    def __truediv__(self, other: Any) -> Any:
        return self._operate("__truediv__", other)

    def __rtruediv__(self, other: Any) -> Any:
        return self._operate("__rtruediv__", other)

    def __mod__(self, other: Any) -> Any:
        return self._operate("__mod__", other)

    def __pow__(self, other: Any) -> Any:
        return self._operate("__pow__", other)

    def __rpow__(self, other: Any) -> Any:
        return self._operate("__rpow__", other)

    def __and__(self, other: Any) -> Any:
        return self._operate("__and__", other)

    def __rand__(self, other: Any) -> Any:
        return self._operate("__rand__", other)

    def __or__(self, other: Any) -> Any:
        return self._operate("__or__", other)

    def __ror__(self, other: Any) -> Any:
        return self._operate("__ror__", other)

    def __xor__(self, other: Any) -> Any:
        return self._operate("__xor__", other)

    def __rxor__(self, other: Any) -> Any:
        return self._operate("__rxor__", other)

    def __iadd__(self, other: Any) -> Any:
        return self._rewrite("add_", other)

    def __isub__(self, other: Any) -> Any:
        return self._rewrite("sub_", other)

    def __imul__(self, other: Any) -> Any:
        return self._rewrite("mul_", other)

    def __itruediv__(self, other: Any) -> Any:
        return self._rewrite("div_", other)

    def __ipow__(self, other: Any) -> Any:
        return self._rewrite("pow_", other)
