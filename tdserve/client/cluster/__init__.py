"""Several servers as one: where each store is, and stores that several servers share."""
