"""Modules and data compared with transformers'."""
