"""Directories that transformers loads."""
