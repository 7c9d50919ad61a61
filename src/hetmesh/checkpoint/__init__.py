"""What a Checkpointer does, part by part: planned, staged, written beside training, named when complete, and read."""
