"""Answers of a run."""
