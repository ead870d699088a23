"""Handles of replays and queues: their rows are written, sampled, taken and changed.

Begin with ``table_handle``, what ``replay`` and ``queue`` have in common. It consists of parts: ``followed_table`` (the
table as this handle knows it), ``row_extends``, ``rows_by_number`` and ``row_draws``. These use the rooms, of which
each imports only those before it: ``extends`` (rows on their way into requests), ``writers`` (of single rows),
``draws`` (samples, leases, batches).

All use ``change_requests`` (requests without content), ``row_annotations`` and ``table_counts``; ``conditional_update``
writes rows that are still the same, ``shaped_rows`` reads rows by numbers in any shape, ``new_table`` and ``row_like``
make tables.
"""
