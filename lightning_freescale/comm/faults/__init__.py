"""Ranks that stop, fail or hang, and their notices to the other ranks."""
