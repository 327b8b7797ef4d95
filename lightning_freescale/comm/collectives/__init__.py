"""Collectives: the ranks agree on one and run it."""
