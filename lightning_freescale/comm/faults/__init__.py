"""How ranks that stop, fail or hang are known to the others."""
