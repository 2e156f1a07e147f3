"""Comparison of a checkpoint with a reference, causes of differences, repairs: `wqk.same`."""
