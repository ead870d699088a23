"""Replay tables and queues: their rows are written or claimed, committed, drawn, and changed.

The rules that decide are ``rules/replay``. Read from the top; each imports only those after it:

1. ``extends``: rows that are written through the server, with ``reserving``: which rows those are.
2. ``claiming`` and ``table_claims``: rows that writers take by themselves; ``commits``: the end of both.
3. ``row_reads`` by number; ``samples``, with ``rank_shares`` (one draw for all ranks), ``selector_building`` and
   ``numbers`` (which rows an index means).
4. ``row_changes``: priorities, deletions, acknowledgements; ``lease_timer``, ``discarding`` and ``dead_values``: what
   leaves or comes back by itself.
5. ``policy_versions``, ``arrivals`` and ``rule_keys``: what comes beside content, and the leaves that rules need;
   ``added_leaves``: leaves that come later.
"""
