"""What is on the disk for certain, and whether it is whole.

Read ``sync_pass`` first: one pass, in an order that is safe at any moment; then ``watermark``: which rows it covers,
and what is left of them after a loss of power. ``row_comparison`` compares rows with their checksums for readers,
``environment_scan`` looks at every record of an environment, and ``record_copy`` copies what is whole of a damaged one.
``bare_rows`` is what rows lack that are served without the rest of their store.
"""
