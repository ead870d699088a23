"""Changes of rows and structures that are stored already, as far as tables and tensordict stores share them: the writes
themselves are in ``tensordicts/writes`` and ``tables``.

Read ``row_write_hold`` first: the rows of a write, which are unreadable meanwhile. ``unfinished_writes`` has the rows
of writers that have died amid one; ``damage_checks`` compares rows before a write of a part of them;
``alteration_folder`` is a change of structure.
"""
