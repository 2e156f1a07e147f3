"""Two checkpoints side by side, and one beside the published models."""
