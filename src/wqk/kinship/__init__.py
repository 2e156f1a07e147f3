"""Lineage of two checkpoints: `wqk.kin`."""
