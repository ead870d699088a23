"""Writes the content of stores into files: the command ``tdserve get``, or ``export_store``.

``column_spool`` reads a store in pieces into temporary files, ``file_formats`` writes a file or folder from those.

``store_export`` does it. ``content_columns`` and ``keyed_columns`` make columns of what is stored.
"""

from __future__ import annotations

from tdserve.exports.store_export import export_store as export_store

__all__ = ["export_store"]
