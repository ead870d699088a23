"""Writers of single rows: an actor appends them one at a time, and they are sent in batches.

Read from the top; each imports only those before it: ``row_buffer`` (the rows that wait), ``nstep`` (transitions of
several steps), ``row_delivery`` (how many rows go at once), ``row_sender`` (the thread that sends them), ``writer``
(what callers hold).
"""
