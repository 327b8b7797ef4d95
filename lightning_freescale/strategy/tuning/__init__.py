"""Settings and costs that a fit chooses by measuring its own steps."""
