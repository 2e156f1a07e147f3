"""Every tolerance of kinship, once: its meaning, and its source."""

from __future__ import annotations

# Models are called related up to this p; a layer counts as matched up to the second of its own.
RELATED, MATCHED = 0.001, 0.01
# Singular values this much closer than usual are pointed out.
CLOSE_SPECTRA = 0.2
# Forms that have changed by more than their own size may share no more than their start.
START = 1.0
# Embeddings or gains that correlate so far are alike; those of unrelated models do by .02.
CORRELATED = 0.2
