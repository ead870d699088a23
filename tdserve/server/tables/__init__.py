"""Replay tables and queues: their rows are written or claimed, committed, drawn, and changed.

Read in this order; the rules that decide are ``rules/replay``:

1. ``extends``, with ``reserving`` (which rows), ``arrivals`` (what comes beside content), ``rule_keys`` (leaves that
   rules need) and ``policy_versions``; then ``commits``.
2. ``claiming`` and ``table_claims``: rows that writers take by themselves.
3. ``samples``, with ``selector_building`` and ``numbers``; ``rank_shares``: one draw for all ranks; ``row_reads``: by
   number.
4. ``row_changes``: priorities, deletions, acknowledgements; ``lease_timer``, ``discarding`` and ``dead_values``: what
   leaves or comes back by itself.
5. ``added_leaves``: leaves that come later.
"""
