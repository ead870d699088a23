"""Handles of replays and queues: their rows are written, sampled, taken and changed.

Begin with ``replay_calls`` and ``queue_calls``: what a replay and a queue offer, whether one server has it or several
share it. ``replay`` and ``queue`` are those of one server; ``table_handle`` is what they have in common. It consists of
parts: ``followed_table`` (the table as this handle knows it), ``row_extends``, ``rows_by_number`` and ``row_draws``.
These use what follows, of which each imports only those before it: ``row_arguments`` (rows and priorities as callers
give them), ``change_requests`` (requests without content), ``table_policy``, ``row_annotations``, ``table_counts``; and
the rooms ``extends`` (rows on their way into requests), ``writers`` (of single rows), ``draws`` (samples, leases,
batches).

``conditional_update`` writes rows that are still the same, ``shaped_rows`` shapes rows read by numbers in any shape,
``new_table`` and ``row_like`` make tables, ``new_leaves`` and ``retype_table`` change them for rows that have more
leaves, or other sizes.
"""
