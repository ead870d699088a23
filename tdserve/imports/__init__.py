"""Imports files and data sets of other libraries into stores: the command ``tdserve import``, or ``import_store``.

Each format has a reader in a file of its own, which opens a path as an ``ImportSource`` and imports its library when it
is used; ``formats`` lists them. ``store_import`` writes what any of them reads.
"""

from __future__ import annotations

from tdserve.imports.store_import import import_store as import_store

__all__ = ["import_store"]
