"""Scans of a checkpoint, surveys of many checkpoints, and watching a run."""
