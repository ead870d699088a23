"""Requests about the entries of keyed stores."""
