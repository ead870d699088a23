"""Commands for operators of a server: they start one, prepare what it needs, and ask whether it is well.

Read ``serve`` first, with ``server_flags``: the options of a server; ``config_show`` shows where each comes from.
``health`` is the check for containers, ``certs`` makes certificates, and ``token`` makes entries of the file of tokens.
``check_root`` (``tdserve check``) compares a root, or a place of checkpoints, with its checksums, and repairs what can
be.
"""
