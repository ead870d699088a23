"""The movers at the client's end of a session: over a channel, in the server's files, or both as access allows.

``channel_mover`` and ``mapped_mover`` are one each; ``partly_mapped_mover`` is both, for a client that cannot read or
write all files.
"""
