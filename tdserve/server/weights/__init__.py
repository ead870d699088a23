"""Versions of weights: published, sent, passed on from client to client, and removed once they are not needed."""
