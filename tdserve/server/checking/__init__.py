"""Checks a root that no server holds, and repairs what can be: ``tdserve check``.

Read from the top; each imports only those after it:

1. ``root_check``: the whole, in its order.
2. ``row_check``, ``catalog_check``, ``value_check`` and ``version_check``: the parts of it.
3. ``catalog_repairs`` and ``row_repairs``; ``repair_process``: a process that a damaged page may end; ``set_aside``:
   folders that no catalog describes.
4. ``findings``: what all of these report.
"""
