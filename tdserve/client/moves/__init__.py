"""Files of stores that a client carries: to another server, or to a checkpoint and back.

``move_steps`` are the requests, ``file_passes`` the files as they are read. Checkpoints: read ``server_checkpoints``
first, then ``checkpoint_writer`` and ``manifest``, then ``checkpoint_restore``, with ``checkpoint_choice`` and
``archive_check`` for damaged ones.
"""
