"""Groups of clients that send tensordicts to one another, without the server between them."""
