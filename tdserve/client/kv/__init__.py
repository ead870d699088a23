"""Keyed stores."""
