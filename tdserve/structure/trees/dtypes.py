"""Dtypes by torch's names: their sizes, and their numbers in messages, in one table."""

from __future__ import annotations

from tdserve.v1 import spec_pb2

_TABLE: tuple[tuple[str, int, int], ...] = (
    ("bool", 1, spec_pb2.DTYPE_BOOL),
    ("uint8", 1, spec_pb2.DTYPE_UINT8),
    ("int8", 1, spec_pb2.DTYPE_INT8),
    ("int16", 2, spec_pb2.DTYPE_INT16),
    ("int32", 4, spec_pb2.DTYPE_INT32),
    ("int64", 8, spec_pb2.DTYPE_INT64),
    ("uint16", 2, spec_pb2.DTYPE_UINT16),
    ("uint32", 4, spec_pb2.DTYPE_UINT32),
    ("uint64", 8, spec_pb2.DTYPE_UINT64),
    ("float16", 2, spec_pb2.DTYPE_FLOAT16),
    ("bfloat16", 2, spec_pb2.DTYPE_BFLOAT16),
    ("float32", 4, spec_pb2.DTYPE_FLOAT32),
    ("float64", 8, spec_pb2.DTYPE_FLOAT64),
    ("complex32", 4, spec_pb2.DTYPE_COMPLEX32),
    ("complex64", 8, spec_pb2.DTYPE_COMPLEX64),
    ("complex128", 16, spec_pb2.DTYPE_COMPLEX128),
    ("float8_e4m3fn", 1, spec_pb2.DTYPE_FLOAT8_E4M3FN),
    ("float8_e4m3fnuz", 1, spec_pb2.DTYPE_FLOAT8_E4M3FNUZ),
    ("float8_e5m2", 1, spec_pb2.DTYPE_FLOAT8_E5M2),
    ("float8_e5m2fnuz", 1, spec_pb2.DTYPE_FLOAT8_E5M2FNUZ),
    ("float8_e8m0fnu", 1, spec_pb2.DTYPE_FLOAT8_E8M0FNU),
)

ITEMSIZE: dict[str, int] = {name: nbytes for name, nbytes, _ in _TABLE}
"""Bytes per element, by name; its keys are all dtypes that tdserve supports."""

WIRE: dict[str, int] = {name: number for name, _, number in _TABLE}
"""Number of the protobuf enum ``DType``, by name."""

NAMES: dict[int, str] = {number: name for name, _, number in _TABLE}
"""Name, by number of the protobuf enum ``DType``."""

_INTEGERS: dict[str, tuple[int, int]] = {
    "bool": (0, 1),
    **{f"uint{bits}": (0, 2**bits - 1) for bits in (8, 16, 32, 64)},
    **{f"int{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (8, 16, 32, 64)},
}
"""Smallest and largest value."""

_FLOATS: dict[str, tuple[int, int, int]] = {
    "float16": (11, -14, 15),
    "bfloat16": (8, -126, 127),
    "float32": (24, -126, 127),
    "float64": (53, -1022, 1023),
}
"""Binary digits, and the exponents of the smallest normal and of the largest value."""

_COMPLEX: dict[str, str] = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}
"""Dtype of the parts."""


def has_all_values(wider: str, dtype: str) -> bool:
    """Returns whether every value of ``dtype`` is a value of ``wider``, so that a conversion loses nothing.

    Real numbers are not converted to complex ones, nor float8 to anything.
    """
    if wider == dtype:
        return True
    if wider in _COMPLEX and dtype in _COMPLEX:
        return has_all_values(_COMPLEX[wider], _COMPLEX[dtype])
    if wider in _FLOATS and dtype in _FLOATS:
        digits, lowest, highest = _FLOATS[dtype]
        wide_digits, wide_lowest, wide_highest = _FLOATS[wider]
        return digits <= wide_digits and highest <= wide_highest and lowest - digits >= wide_lowest - wide_digits
    if dtype not in _INTEGERS:
        return False
    smallest, largest = _INTEGERS[dtype]
    if wider in _FLOATS:
        return max(-smallest, largest) <= 1 << _FLOATS[wider][0]
    least, most = _INTEGERS.get(wider, (0, -1))
    return least <= smallest and largest <= most


WIDER: dict[str, str] = {
    "bfloat16": "float32",
    "complex32": "complex64",
    **{name: "float32" for name in ITEMSIZE if name.startswith("float8")},
}
"""Dtypes that NumPy lacks, and those in which arrays have their values: these hold all of them."""

DIFFERENTIABLE = ("float", "bfloat", "complex")
"""Prefixes of the names of dtypes whose tensors may require grad."""
