"""Versions of weights: published, pulled, followed, and passed on to other clients."""
