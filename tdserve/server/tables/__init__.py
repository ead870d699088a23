"""Replays and queues: their rows come or are claimed, are committed, drawn, and changed."""
