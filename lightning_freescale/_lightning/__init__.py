"""The only room that touches private names of Lightning."""
