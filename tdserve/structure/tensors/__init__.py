"""Tensors of every kind, as plain ones that can be sent and filled.

Read ``torch_types`` (dtypes by name) and ``plain_tensors`` first. ``array_tensors``, ``listed_tensors`` and
``file_tensors`` come from NumPy, lists and files; ``pieces`` differ in shape; ``tensor_view`` compares many at once,
and ``independent_views`` are views of memory.
"""
