"""The local end of a client on the server's own machine: it maps the files and copies the content.

Read ``end`` first: the socket and the lock. ``local_reads`` and ``local_writes`` copy content, ``overwrites`` are those
under way, ``local_claim`` is for rows that were claimed. ``root_files`` reaches the files, ``sharing`` divides long
copies among threads.
"""
