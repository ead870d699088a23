"""Reads and writes of mapped stores: by a data worker for remote clients, by a local client for itself."""
