"""A training run's folder, runs grouped by seed, and how much sooner one group learns."""
