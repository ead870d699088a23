"""Replays and queues that several servers share.

Read from the top; each imports only those before it:

1. ``key_shards`` and ``shard_writes``: which shard gets which rows. ``sharded_writer``: a writer for each shard.
2. ``table_creation``; ``sharded_rows``: rows by their numbers; ``sharded_table``: what both kinds have in common.
3. ``shard_masses`` (what may be drawn from a shard), ``drawn_parts`` (what was), ``shard_draws`` and ``shard_shares``
   (draws from all shards as from one table, for one reader and for ranks).
4. ``sharded_batches``: rows on lease of several shards; ``shard_takes``: how both kinds take them.
5. ``sharded_queue`` and ``sharded_replay``: what callers hold.
"""
