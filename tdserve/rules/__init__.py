"""The server's rules: plain objects without I/O, clock and threads."""
