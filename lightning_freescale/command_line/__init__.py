"""What ``freescale`` does on the command line."""
