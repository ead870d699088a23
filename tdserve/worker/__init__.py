"""The data worker: a process that maps stores and moves bytes for remote clients. It decides nothing.

Its orders come from the control process over a UNIX socket; every session has a thread of its own, so that a client
that stalls holds up nobody else.
"""
