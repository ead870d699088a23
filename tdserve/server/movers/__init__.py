"""The movers of a session's content: its data worker (``worker_mover``), its local client (``permit_mover``), or both
(``split_mover``), for a client that cannot read or write all files."""
