"""What a client does for other clients: it keeps versions of weights, and passes them on over links of their own."""
