"""What makes an update directional: the text's order, the mean of the inputs, or their coordinates.

A layer's update Σ_ij β_ij x_i x_jᵀ is made anew with one thing changed, and its rows and columns
are compared again. Row sums of β are 0, because a softmax does not see what all its scores have in
common; so the mean of the inputs falls out of the context side of every update, and stays on the
predicted one.

Axes: B batch, N tokens (i predicted, j context), D width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from wqk.forms import BilinearForm

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from wqk.theory.subject import Subject

# Directions with less than this part of the largest variance are taken for rounding.
FLAT = 1e-6


class Update(NamedTuple):
    """What one layer's update on one batch is made of.

    Attributes
    ----------
    layer
        Its number.
    inputs
        x, (B, N, D): what the query and key projections are applied to.
    beta
        β summed over heads, (B, N, N).
    """

    layer: int
    inputs: np.ndarray
    beta: np.ndarray

    @property
    def form(self) -> BilinearForm:
        """Σ_ij β_ij x_i x_jᵀ over the batch, as a form."""
        return self.between(self.inputs, self.inputs)

    def between(self, predicted: np.ndarray, context: np.ndarray) -> BilinearForm:
        """Σ_ij β_ij y_i z_jᵀ for other vectors on either side, both (B, N, D)."""
        width = predicted.shape[-1]
        key = (self.beta @ context).reshape(-1, width)
        return BilinearForm(predicted.reshape(-1, width).T, key.T)


def in_isolation(updates: Sequence[Update], seed: int = 0) -> dict[str, list[BilinearForm]]:
    """The updates of one layer on several batches, as they are and with one thing changed.

    ``as it is``. ``centered``: inputs less their mean over all batches. ``isotropic``: centered
    and made of equal variance in all directions. ``rotated``: in another orthonormal basis, drawn
    at random. ``random signs``: every β_ij with a sign of its own.

    Parameters
    ----------
    updates
        Of one layer.
    seed
        Of the basis and the signs.

    Examples
    --------
    >>> random = np.random.default_rng(0)
    >>> beta = np.tril(random.standard_normal((2, 8, 8)))
    >>> update = Update(0, 5 + random.standard_normal((2, 8, 4)), beta)
    >>> sorted(in_isolation([update]))
    ['as it is', 'centered', 'isotropic', 'random signs', 'rotated']
    """
    random = np.random.default_rng(seed)
    width = updates[0].inputs.shape[-1]
    everything = np.concatenate([update.inputs.reshape(-1, width) for update in updates])
    everything = everything.astype(np.float64)
    mean = everything.mean(axis=0)
    whitening = _inverse_root(np.cov(everything, rowvar=False))
    basis = np.linalg.qr(random.standard_normal((width, width)))[0]

    changes: dict[str, Callable[[Update], BilinearForm]] = {
        "as it is": lambda update: update.form,
        "centered": lambda update: _of(update, update.inputs - mean),
        "isotropic": lambda update: _of(update, (update.inputs - mean) @ whitening),
        "rotated": lambda update: _of(update, update.inputs @ basis),
        "random signs": lambda update: _with_signs(update, random).form,
    }
    return {name: [change(update) for update in updates] for name, change in changes.items()}


def rearranged(subject: Subject) -> dict[str, Subject]:
    """The subject on its own text, on the same blocks shuffled, and on the blocks read backwards.

    Examples
    --------
    >>> from wqk.theory.subject import Subject
    >>> subject = Subject("none", None, "causal", np.arange(8).reshape(1, 2, 4))
    >>> rearranged(subject)["reversed"].blocks.tolist()
    [[[3, 2, 1, 0], [7, 6, 5, 4]]]
    """
    random = np.random.default_rng(subject.seed)
    return {
        "as it is": subject,
        "shuffled": subject.having(blocks=random.permuted(subject.blocks, axis=-1)),
        "reversed": subject.having(blocks=np.ascontiguousarray(subject.blocks[..., ::-1])),
    }


def _of(update: Update, inputs: np.ndarray) -> BilinearForm:
    return update._replace(inputs=inputs).form


def _with_signs(update: Update, random: np.random.Generator) -> Update:
    return update._replace(beta=update.beta * random.choice([-1.0, 1.0], update.beta.shape))


def _inverse_root(covariance: np.ndarray) -> np.ndarray:
    """Σ^(−1/2), of the directions in which there is any variance."""
    values, vectors = np.linalg.eigh(covariance)
    kept = values > FLAT * values.max()
    return np.asarray(vectors[:, kept] / np.sqrt(values[kept]) @ vectors[:, kept].T)
