"""The version and the address of the documentation, for the package and for what it writes."""

__version__ = "0.1.0"
SITE = "https://lightning-freescale.readthedocs.io/en/latest/"
