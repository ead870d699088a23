"""Extends: rows as callers give them, on their way into requests.

Read from the top; each imports only those before it:

1. ``given_rows``: the forms in which callers give rows; ``destack`` makes columns of rows that are stacked lazily.
2. ``extend_parts``: a single extend, which may share a request with others. ``claim_policy``: when a handle asks for
   rows in advance. ``extend_coalescer``: what joins extends, and sends them.
"""
