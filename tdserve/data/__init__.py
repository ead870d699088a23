"""What a process does with the stores that it has mapped: a data worker for others, a local client for itself."""
