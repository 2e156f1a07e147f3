"""Whether two checkpoints are the same model, and why not: `wqk.same`."""
