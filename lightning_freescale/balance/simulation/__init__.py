"""What balancing would bring, from nothing but history lengths: behind ``python -m lightning_freescale.balance simulate``."""
