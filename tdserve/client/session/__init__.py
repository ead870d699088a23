"""The connection of a client to its server: sessions, calls, and what identifies both."""
