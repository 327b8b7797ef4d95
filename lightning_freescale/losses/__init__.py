"""Losses over a whole catalogue of items. Needs torch alone."""

from lightning_freescale.losses.catalogue import catalogue_cross_entropy

__all__ = ["catalogue_cross_entropy"]
