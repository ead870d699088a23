"""What the server decides, and by which rules: plain objects without I/O, clock and threads."""
