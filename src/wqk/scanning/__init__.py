"""From checkpoints to score tables: one, many, or two compared."""
