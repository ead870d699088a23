"""The servers of a cluster, and where each store is.

Read from the top; each imports only those before it:

1. ``membership`` (the servers by number) and ``members`` (their clients, made when first used).
2. ``placement_records`` (where stores are), ``latest_records`` (whose answer counts), ``calls_that_follow`` (calls of
   a store that may have moved), ``directory`` (the server of each store).
3. ``part_errors`` (errors of a part of a shared store, as those of the store), ``lost_parts`` (parts that their servers
   do not have) and ``policy_feeds`` (the newest versions of policies); ``cluster_servers`` has the last two, and the
   directory, for handles.
"""
