"""The commands of ``freescale``."""
