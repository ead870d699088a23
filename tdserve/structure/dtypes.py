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

DIFFERENTIABLE = ("float", "bfloat", "complex")
"""Prefixes of the names of dtypes whose tensors may require grad."""
