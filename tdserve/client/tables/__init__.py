"""Handles of replays and queues: their rows are written, sampled, taken and changed."""
