"""One open store, as all kinds of stores and all requests see it.

Read ``opened_store`` first: its record, its rules and its waiters; ``specs`` has the structures of all stores, each
kept once, since kinds of stores and data workers need them before there is a catalog of stores. The others are details:
``weight_readers`` and ``counts`` (what is known of it), ``staging_names`` (its files for content under way) and
``worker_spec_cache`` (which structures a data worker knows).
"""
