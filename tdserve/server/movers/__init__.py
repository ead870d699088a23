"""The two movers of a session's content, its data worker's and its local client's, and what chooses between them."""
