"""Reads and writes of mapped stores: by a data worker for remote clients, by a local client for itself.

Read ``mapped_stores`` first. ``read_plans`` and ``rows_source`` read rows, with ``places`` (where rows are in leaves);
``own_reads`` are those that need no decision of control. ``row_claim`` writes claimed rows. ``values`` and
``values_budget`` are for non-tensor values, ``stored_entries`` for keyed stores.
"""
