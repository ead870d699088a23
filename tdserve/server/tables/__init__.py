"""Replay tables and queues: their rows are written or claimed, committed, drawn, and changed."""
