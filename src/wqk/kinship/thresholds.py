"""All tolerances of kinship, each with its meaning and source."""

from __future__ import annotations

# Two models are related up to RELATED. A layer counts as matched up to MATCHED, of its own p.
RELATED, MATCHED = 0.001, 0.01
# Factor by which reported singular values are closer than usual.
CLOSE_SPECTRA = 0.2
# Forms with changes larger than their own size may have only the start in common.
START = 1.0
# Embeddings or gains with a larger correlation are alike; those of unrelated models reach .02.
CORRELATED = 0.2
# Values that differ by no more than this, relative to the larger, are equal but for rounding to 16
# bits: twice the distance of neighboring bfloat16 numbers.
SIXTEEN_BITS = 2.0**-7
