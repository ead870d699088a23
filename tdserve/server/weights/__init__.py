"""Versions of weights: published, sent, passed on from client to client, and removed once they are not needed.

Read from the top; each imports only those after it:

1. ``publishing``: a version is received, and becomes visible whole; ``unpublished``: stores without one yet.
2. ``version_sender``: a version is sent, with ``relays`` (which client passes it to which), ``small_versions`` (kept in
   memory) and ``checksums`` (of which leaves a reader has already).
3. ``version_files``: files of versions, and their removal.
"""
