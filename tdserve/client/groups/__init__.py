"""Groups of clients that send tensordicts to one another, not through the server."""
