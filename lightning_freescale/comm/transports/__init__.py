"""What moves the bytes."""
