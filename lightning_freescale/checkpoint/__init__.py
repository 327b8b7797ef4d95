"""Ordinary checkpoints of sharded modules."""
