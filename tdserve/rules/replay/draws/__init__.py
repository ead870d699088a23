"""A draw, with its counts and limits; and draws that are kept, since several ranks share them.

Read ``drawing`` first; then ``kept_draw``, one draw for all ranks, which ``dealing`` deals to them, and ``kept_draws``,
those of a table.
"""
