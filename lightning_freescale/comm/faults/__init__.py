"""Ranks that stop, fail or hang, and what the other ranks learn about them."""
