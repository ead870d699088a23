"""The two movers at the client's end of a session: over the network, and in the server's files."""
