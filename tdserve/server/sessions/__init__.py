"""Clients as the control process holds them: their sessions, those on this machine, and what moves for them."""
