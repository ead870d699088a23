"""Imports files and data sets of other libraries into stores: the command ``tdserve import``, or ``import_store``.

Each format has a reader in a file of its own, which opens a path as an ``ImportSource`` and imports its library when it
is used; ``formats`` lists them. What any of them reads, ``store_import`` writes into a new store, and ``table_import``
appends to a table.

The readers are ``npz_columns``, ``hdf5_columns``, ``json_lines``, ``tensor_files``, ``hf_table`` and
``minari_episodes``; ``import_source`` is what each provides, and ``ragged_rows`` has rows that differ in length.
"""

from __future__ import annotations

from tdserve.imports.store_import import import_store as import_store
from tdserve.imports.table_import import append_rows as append_rows

__all__ = ["append_rows", "import_store"]
