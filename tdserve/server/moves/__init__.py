"""Stores that move from one server to another. A client carries their files and what is on record of them."""
