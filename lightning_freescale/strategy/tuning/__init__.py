"""Measurement of training steps, to fit the costs of samples and to choose settings."""
