"""The data worker: a process that maps stores and moves bytes for remote clients. It decides nothing, and writes
generations only in rows that it has claimed (§5.7 of the protocol book).

Its orders come from the control process over a UNIX socket. Every session has a thread of its own, so a client that
stalls delays no other.
"""
