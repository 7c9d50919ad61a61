"""What `tools/fuzz.py` runs, one module per kind of input."""
