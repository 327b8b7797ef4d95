"""Communication. Needs torch alone."""
