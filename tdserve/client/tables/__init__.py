"""Handles of replays and queues: rows are written, drawn, taken, changed."""
