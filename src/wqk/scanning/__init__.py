"""From checkpoints to score tables: scans of one checkpoint, surveys of many, watching a run."""
