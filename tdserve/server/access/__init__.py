"""Who is served: tokens, and the limits of each."""
