"""What a run writes, and what reads it back."""
