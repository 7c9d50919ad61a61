"""Analyses of schedules, timelines and costs that only benchmarks and tests need."""
