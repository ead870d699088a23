"""The relays of a client: it keeps versions of weights, and passes them on to other clients over hops."""
