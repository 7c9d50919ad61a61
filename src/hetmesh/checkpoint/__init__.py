"""Saves and loads across layouts: planned, staged, written beside training, named when complete, read."""
