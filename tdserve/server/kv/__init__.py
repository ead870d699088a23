"""Requests about the entries of keyed stores.

``keyed_entries`` numbers, orders and acknowledges them; data workers carry them out.
"""
