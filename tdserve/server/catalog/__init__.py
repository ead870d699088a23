"""The stores of a root: found, opened, made, described, closed and deleted.

Read in this order:

1. ``stores``: all of them, kept in the catalog on disk and restored from it; ``store_waiters``: who waits for one.
2. ``opening``, ``opened_stores`` and ``loading_stores``: those that are open; ``packed_stores``: small ones without
   files; ``seals``: those that serve no request for a time.
3. ``creation`` and ``adoption``: how stores come to be; ``descriptions``, then ``catalog_requests``: what is told of
   them; ``removed_stores`` and ``deleted_memory``: what becomes of deleted ones; ``former_versions``: what
   is known of them.
4. ``kept_records``, ``later_records`` and ``moments``: what each store's folder has of its record, for a catalog that
   lacks it, and when that was written.
"""
