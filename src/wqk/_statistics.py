"""Small statistics that tables of any kind need."""

from __future__ import annotations

import numpy as np

# The corrected p below which a pair of heads is beyond chance.
SIGNIFICANT = 0.01


def holm(p: np.ndarray, tests: int | None = None) -> np.ndarray:
    """P-values corrected for the number of tests as Holm (1979) does.

    Holds whatever the dependence between tests, at the price of some power.

    Parameters
    ----------
    p
        Of each test; NaN where there was none, and there only stays NaN.
    tests
        Their number, if it is not that of the values.

    Examples
    --------
    >>> holm(np.array([0.04, 0.01, np.nan, 0.03])).tolist()
    [0.06, 0.03, nan, 0.06]
    """
    order = np.argsort(p, kind="stable")  # NaN last
    left = (np.count_nonzero(~np.isnan(p)) if tests is None else tests) - np.arange(len(p))
    corrected = np.empty(len(p))
    corrected[order] = np.minimum(np.maximum.accumulate(p[order] * left), 1)
    return corrected
