"""The two movers of a session's content at the client: over the network, and in the server's files."""
