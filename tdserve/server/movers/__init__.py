"""The two movers of a session's content: its data worker, and its local client."""
