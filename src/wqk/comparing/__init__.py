"""Two checkpoints, or more, side by side."""
