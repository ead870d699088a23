"""Checks a root that no server holds, and repairs what can be: ``tdserve check``."""
