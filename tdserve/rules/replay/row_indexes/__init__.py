"""Indexes of rows (sets, columns, orders), on which the other rules are built. No step takes long when they grow.

``live_rows`` holds the rows that may be read (a row is drawn in constant time), ``row_mask`` sets of a byte per row,
``ordered_rows`` has rows in the order in which they came, ``row_order`` which of them continue the one before, and
``slice_starts`` where slices begin. ``columns`` has numbers per row, ``priorities`` sums over a number per row, and
``parted_dict`` very many numbers by key.
"""
