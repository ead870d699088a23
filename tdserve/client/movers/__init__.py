"""The movers at the client's end of a session: over a channel, in the server's files, or both as access allows."""
