"""LMDB: the catalog, and what all environments have in common.

Read ``environments`` first, the registry of those that are open; then ``catalog_db``, the catalog, and
``catalog_room``, the disk space that is reserved for it. ``page_walk`` follows the pages of a file without LMDB;
``pinned_tree`` (a tree as of one moment) and ``changed_byte`` (which byte of the first pages has changed) use it.
"""
