"""What processes of one machine hand to one another: files and memory that end with what they are for.

``staging`` has bytes that arrived whole and are not yet in their place, ``spools`` values that are too many for a
message, ``segments`` memory that one process fills and another reads, and ``session_locks`` the proof that a client
lives which may write.
"""
