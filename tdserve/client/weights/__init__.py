"""Versions of weights: published, pulled and followed."""
