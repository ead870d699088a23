"""Groups of clients that send tensordicts to one another, not through the server.

Read ``group`` first: the calls. A member enters an epoch (``epoch_entry``, ``epoch``); the rule of its losses is
``losses``. The members agree on a call (``agreement``), then content moves: ``member_parts``, ``movers`` and
``reducing``. ``group_errors`` names the group in errors.
"""
