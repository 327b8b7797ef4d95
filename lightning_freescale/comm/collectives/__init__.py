"""How the ranks agree on a collective and run it."""
