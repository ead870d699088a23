"""Stores that several servers share, whatever their kind.

Read from the top; each imports only those before it:

1. ``divisions``: which rows or keys each shard has. ``shared_parts``: where the shards are, and their handles.
2. ``sharded_store``: calls to one shard, some or all. ``joined_rows``: the rows that several have read.
3. ``part_creation``: creation and deletion. ``sharded_dataset`` and ``sharded_keyed`` are two of the kinds; tables are
   in the room of that name.
"""
