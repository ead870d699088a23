"""What differs between the kinds of stores when one is created, opened, described and repaired: a class for each.

Begin with ``store_kind``, the contract of a kind, and one that fulfils it. Then read from the top; each imports only
those after it:

1. ``all_kinds``: the registry of them, by name.
2. ``table_kind``, with ``policies`` (whose versions make a table's rows); ``tensordict_kind``, ``weights_kind``,
   ``keyed_kind``; ``placement_kind``: stores that several servers share.
3. ``store_kind``, then ``row_files`` (created) and ``surviving_rows`` (repaired): files of stores with rows.
"""
