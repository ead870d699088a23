"""Files of stores that a client carries: to another server, or to a checkpoint and back."""
