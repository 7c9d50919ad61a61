"""Modules and data against transformers."""
