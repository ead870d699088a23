"""Draws: rows that the server chooses, as samples, on lease, or as batches that are made ahead.

Read from the top; each imports only those before it:

1. ``share`` (one rank's part of a draw), ``draw_arguments`` and ``query``: what callers ask for.
2. ``sampled``: rows on their way to the caller. ``sampling``: a sample, from its request to its rows. ``taking``: rows
   on lease, until they are acknowledged.
3. ``batches_ahead``: a thread that makes batches before they are asked for; ``batches`` of samples, and
   ``taken_batches`` of rows on lease, iterate over them. ``row_takes``: what takes rows of any table.
"""
