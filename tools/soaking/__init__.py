"""What tools/soak.py does that is longer than a few lines."""
