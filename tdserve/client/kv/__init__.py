"""Keyed stores.

Read ``keyed_handle`` first, with ``entry_mapping``, its calls as a mapping; ``new_store`` makes the stores.
``key_arguments`` and ``filled_places`` are arguments. ``records`` and ``tensor_records`` are the stored form of
entries, ``put_coalescer`` joins puts.
"""
