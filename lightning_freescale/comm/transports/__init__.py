"""Transports, which move the bytes of a collective. See :class:`.Transport` for their interface."""
