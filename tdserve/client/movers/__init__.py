"""The movers at the client's end of a session: over a channel, in the server's files, or both as access allows.

``channel_mover`` and ``mapped_mover`` are one each; ``mover_choice`` says which of them moves what of a session.
"""
