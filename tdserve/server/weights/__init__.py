"""Versions of weights: received and shown, handed from client to client, and gone again when nobody shows them."""
