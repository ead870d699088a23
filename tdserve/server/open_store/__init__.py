"""One open store, as all kinds of stores and all requests see it.

Read ``opened_store`` first: its record, its rules and its waiters; ``specs`` has the structures of stores, each kept
once. The others are details: ``weight_readers`` and ``counts`` (what is known of it), ``staging_names`` (its files for
content under way) and ``worker_spec_cache`` (what a data worker knows of it).
"""
