"""Transports: they move the bytes of a collective."""
