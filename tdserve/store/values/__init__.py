"""The non-tensor values of a store, and the entries of a keyed one: bytes in LMDB, which are never decoded here.

Read ``objects`` first, with its keys (``object_rows``) and the values that are stored as one (``bundles``); then
``entry_tables`` and ``use_marks`` of keyed stores. ``object_folders`` has the folders, and compacts one into another;
``pinned_values`` and ``value_copy`` copy all values as of one moment.
"""
