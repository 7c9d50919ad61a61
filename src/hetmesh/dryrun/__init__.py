"""The trainer on a device that computes nothing."""
