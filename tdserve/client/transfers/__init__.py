"""Content between a client and its server: uploads and downloads, reads and writes of one call each.

Read ``write`` and ``read`` first, then their content: ``upload`` and ``download``. ``placing`` writes into the server's
files. ``read_selection`` reads what an index selects, and ``coalescer`` is what coalescers of writes share.
"""
