"""Eigenvalues of heads next to PyTorch's: ``OMP_NUM_THREADS=1 python -m benchmarks.eigenvalues``.

TransformerLens's ``FactoredMatrix.eigenvalues`` is the function of PyTorch that runs here: the
eigenvalues of the product of the factors in the other order.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np

from benchmarks.rounds import estimate
from wqk.forms import BilinearForm

HEADS, WIDTH, RANK = 144, 768, 64  # those of BERT-base


def seconds(call: Callable[[], object]) -> float:
    """Return the processor time of a call."""
    before = time.process_time()
    call()
    return time.process_time() - before


def main() -> None:
    """Print the ratio of both times, measured in turns."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    query, key = np.random.default_rng(0).standard_normal((2, HEADS, WIDTH, RANK), np.float32)
    form = BilinearForm(query, key)
    torch_query, torch_key = torch.from_numpy(query), torch.from_numpy(key)

    def peer() -> torch.Tensor:
        return torch.linalg.eigvals(torch_key.mT @ torch_query)

    form.eigenvalues(), peer()  # the first call loads libraries
    times = np.array([(seconds(form.eigenvalues), seconds(peer)) for _ in range(options.rounds)])
    print(
        f"Eigenvalues of {HEADS} heads, d {WIDTH}, rank {RANK}, float32: wqk "
        f"{np.median(times[:, 0]):.2f} s of processor time, {estimate(times[:, 0] / times[:, 1])} "
        f"times PyTorch's"
    )


if __name__ == "__main__":
    main()
