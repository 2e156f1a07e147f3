"""One attention block of a model: heads as bilinear forms, and the rest of the score.

Axes: H query heads, G key heads, R head width, D width, N tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from html import escape
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from wqk._guesses import METHOD_CALLS
from wqk._machine import cached_property
from wqk._typing import Array, Float
from wqk.attention.factors import (
    PLAIN,
    BlockWeights,
    Coordinates,
    Omission,
    at_distance,
    augmented,
    lacks_norm,
    omissions,
    stacked,
)
from wqk.attention.measures import Bands, Ceilings, ceilings, rotary_bands
from wqk.errors import Advising, CheckpointError, FormError, UnknownFamily
from wqk.forms import BilinearForm
from wqk.forms.arrays import array_namespace, is_number

# Attributes of similar libraries, and the attributes of a block that replace them.
BLOCK_SYNONYMS = {
    "coupling": "wqk.coupling(block)",
    "head": "block[index]",
    "key_heads": "key_head_count",
    **{name: f"plan.{name}" for name in ("causal", "clip", "scale", "sinks", "softcap", "window")},
    **dict.fromkeys(("rope", "rotary"), "plan.rotary"),
}


class Block(BlockWeights, Advising, synonyms=BLOCK_SYNONYMS, calls=METHOD_CALLS):
    """One attention block of a model that was opened with `wqk.open`.

    Each weight is read on first use, and only once. The linear parts of norms between projection
    and score, gains and centering, are folded into the forms. The scale of each token is not part
    of the forms; `queries` and `keys` include it.

    Attributes
    ----------
    checkpoint
        The checkpoint that stores the weights.
    plan
        The weights of the block and the other terms of its score: stack, kind, layer, scale,
        rotary positions, status.

    Examples
    --------
    >>> import wqk
    >>> block = wqk.open(wqk.demo_model("encoder"))[0]
    >>> block
    Block(encoder self-attention, layer 0: 4 heads of width 32)
    >>> block[2].qk
    BilinearForm(128 × 128, rank 32)
    """

    @property
    def _itself(self) -> Block:
        """Return the block."""
        return self

    @property
    def heads(self) -> Heads:
        """The H heads, in order."""
        return Heads(self)

    @cached_property
    def groups(self) -> BilinearForm:
        """Forms of the heads as a stack (G, H/G): row g contains the heads that share key head g.

        Computations on all heads use this stack, in which each shared factor is stored once.
        """
        return stacked(self.query.weight, self.key.weight)

    @cached_property
    def form(self) -> BilinearForm:
        """Query-key form of the layer: the sum over its heads, of rank G·R (paper, S20)."""
        return self.groups.sum()

    @cached_property
    def ov(self) -> BilinearForm:
        """Return the layer's output-value form, the sum over its heads of W_v W_o.

        Raises `CheckpointError` if the family describes no values and outputs, or the checkpoint
        lacks them.
        """
        return self.at(circuit="ov").sum()

    def at(
        self,
        distance: int = 0,
        *,
        fold_norm: bool = False,
        bias: bool = False,
        circuit: Literal["qk", "ov"] = "qk",
    ) -> BilinearForm:
        """Return the heads' forms in other coordinates than the plain W_q W_kᵀ.

        `wqk.attention.factors` describes the parameters. Coordinates that the block does not have
        raise `CheckpointError`.

        Examples
        --------
        >>> import wqk
        >>> block = wqk.open(wqk.demo_model("decoder"))[0]
        >>> block.at(fold_norm=True)[2], block.at(bias=True).sum()
        (BilinearForm(128 × 128, rank 32), BilinearForm(129 × 129, rank 128))
        """
        ((_, groups),) = self.forms(Coordinates(circuit, fold_norm, bias, (distance,)))
        return Heads(self, groups)

    @overload
    def __getitem__(self, index: int) -> Head: ...
    @overload
    def __getitem__(self, index: slice) -> BilinearForm: ...
    def __getitem__(self, index: int | slice) -> BilinearForm:
        """Return a head; or the forms of several heads, as a stack."""
        if not (is_number(index) or isinstance(index, slice)):
            raise IndexError(f"a head is a number, as in block[3], or a slice; got {index!r}")
        form: BilinearForm = self.heads[index]
        return form

    def __len__(self) -> int:
        return self.head_count

    def __iter__(self) -> Iterator[Head]:
        return iter(self.heads)

    def forms(
        self, coordinates: Coordinates = PLAIN, every_bias: bool = False
    ) -> Iterator[tuple[int, BilinearForm]]:
        """Yield each distance with the forms of all heads at this distance, stacked as `groups`.

        With ``every_bias``, the key's bias is included even if it cancels in the softmax. This is
        necessary for comparing scores of different queries.

        Raises `CheckpointError` if the block has no values and outputs, or no rotary positions.
        """
        plan = self.plan
        left_norm = right_norm = None
        fold = coordinates.fold_norm and not lacks_norm(plan, coordinates)
        if coordinates.circuit == "ov":
            left, right = self.value_output
            if fold and plan.value is not None:
                left_norm = plan.value.input_norm
        else:
            left, right = self.query_key
            if fold:
                left_norm, right_norm = plan.query.input_norm, plan.key.input_norm
        left_weight, left_bias = self.linear(left, left_norm)
        right_weight, right_bias = self.linear(right, right_norm)
        if coordinates.bias:
            if not self._right_bias_counts(coordinates, right_bias, every_bias):
                right_bias = None
            left_weight = augmented(left_weight, left_bias)
            right_weight = augmented(right_weight, right_bias)
        plain = stacked(left_weight, right_weight)
        return ((n, at_distance(plain, plan, n)) for n in coordinates.distances)

    def _right_bias_counts(
        self, coordinates: Coordinates, bias: Array | None, every_bias: bool
    ) -> bool:
        """Return whether the bias of the keys is part of the form; False for outputs."""
        if coordinates.circuit == "ov":
            return False
        if every_bias:
            return True
        if self.plan.rule.guess and bias is not None:
            raise CheckpointError(
                f"layer {self.layer} of the {self.stack} was guessed from tensor names; "
                "the key's bias counts only with rotary positions, and whether it has these is "
                "not known; leave out the biases, or describe the model in a family file"
            )
        return self.plan.key_bias_counts

    def weights(self, circuit: Literal["qk", "ov"] = "qk") -> tuple[Array, Array]:
        """Return the two weights of a circuit, (H, R, D) and (G, R, D)."""
        left, right = self.query_key if circuit == "qk" else self.value_output
        return left.weight, right.weight

    def drawn_weights(self, circuit: Literal["qk", "ov"] = "qk") -> tuple[Array, ...]:
        """Return the matrices (…, outputs, inputs) that an initialization draws for a circuit."""
        left, right = self.query_key if circuit == "qk" else self.value_output
        return left.drawn + right.drawn

    def ceiling(self, distances: Sequence[int] = (0,)) -> Ceilings | None:
        """Bound the scores that any input can produce; None if they have no bound.

        See `wqk.attention.measures`.
        """
        return ceilings(self, distances)

    def bands(self) -> Bands:
        """Measure the distribution of each head's weight over its rotary planes."""
        return rotary_bands(self)

    def omissions(self, coordinates: Coordinates = PLAIN) -> tuple[Omission, ...]:
        """List the terms of the score that are not part of the forms in these coordinates."""
        return tuple(omissions(self.plan, coordinates))

    def with_weights(self, query: Array, key: Array, biases: bool = True) -> Block:
        """Replace the stored weights, (H, R, D) and (G, R, D); the biases are kept or dropped."""
        sides = []
        for side, weight in ((self.query, query), (self.key, key)):
            bias = side.stored_bias if biases else None
            sides.append(replace(side, stored_weight=weight, stored_bias=bias, outer=None))
        changed = copy(self)
        for name in ("groups", "form"):
            changed.__dict__.pop(name, None)
        changed.__dict__["query_key"] = tuple(sides)
        return changed

    def queries(
        self, x: Float[Array, "*batch tokens d"], positions: np.ndarray | None = None
    ) -> Float[Array, "*batch heads tokens width"]:
        """Return the queries of some inputs, as they enter the score.

        They include biases, norms, temperatures, limits and rotary positions; latent attention's
        position dimensions come last.

        Parameters
        ----------
        x
            Inputs of the projection: in most models, the output of the norm before it.
        positions
            Positions of the tokens, (N,); by default 0, 1, 2, ...

        Examples
        --------
        >>> import numpy as np, wqk
        >>> block = wqk.open(wqk.demo_model("decoder"))[0]
        >>> block.queries(np.ones((5, 128), np.float32)).shape
        (4, 5, 32)
        """
        self._require_known("a query")
        return self._vectors(0, x, positions)

    def keys(
        self, y: Float[Array, "*batch tokens d"], positions: np.ndarray | None = None
    ) -> Float[Array, "*batch heads tokens width"]:
        """Return the keys, as `queries` does: a key for each query head."""
        self._require_known("a key")
        return self._shared(self._vectors(1, y, positions))

    def products(
        self,
        x: Float[np.ndarray, "*batch queries d"],
        y: Float[np.ndarray, "*batch keys d"],
        positions: tuple[np.ndarray, np.ndarray] | None = None,
    ) -> Float[np.ndarray, "*batch heads queries keys"]:
        """Return the products q·k of queries and keys, before they are scaled.

        Without positions, all pairs have the distance 0.
        """
        if positions is None:
            positions = np.zeros(x.shape[-2]), np.zeros(y.shape[-2])
        queries, keys = self._vectors(0, x, positions[0]), self._vectors(1, y, positions[1])
        return np.asarray(queries @ self._shared(keys).swapaxes(-1, -2))

    def logits(
        self,
        x: Float[np.ndarray, "*batch queries d"],
        y: Float[np.ndarray, "*batch keys d"],
        distance: int | None = None,
    ) -> Float[np.ndarray, "*batch heads queries keys"]:
        """Return the scaled scores of queries x_i and keys y_j, with the model's soft cap, if any.

        The input of the softmax, without additive terms: masks, sinks, linear biases and
        learned positions (``plan.position``).

        Parameters
        ----------
        x, y
            Inputs of the projections.
        distance
            Score every pair as if the key were this many tokens before the query; by default each
            token's position is its place.

        Examples
        --------
        >>> import numpy as np, wqk
        >>> block = wqk.open(wqk.demo_model("decoder"))[0]
        >>> x = np.random.default_rng(0).standard_normal((5, 128))
        >>> block.logits(x, x).shape
        (4, 5, 5)
        """
        self._require_known("a query")
        if not self.plan.has_softmax:
            raise UnknownFamily(f"{self.plan.what} has no softmax, and so no logits; see products")
        queries, keys = x.shape[-2], y.shape[-2]
        positions = np.arange(queries), np.arange(keys)
        if distance is not None:
            positions = np.full(queries, distance), np.zeros(keys, int)
        return self.scores(self.products(x, y, positions))

    def scores(self, products: np.ndarray) -> np.ndarray:
        """Return products q·k as scaled scores, with the model's soft cap, if any."""
        scores, cap = self.plan.score_scale * products, self.plan.softcap
        return np.asarray(cap * np.tanh(scores / cap) if cap else scores)

    def _require_known(self, what: str) -> None:
        if self.plan.rule.guess:
            raise UnknownFamily(
                f"{what} needs the model's scale and positions, which are unknown: the family was "
                "guessed from tensor names; describe the model in a family file"
            )

    def _shared(self, keys: Array) -> Array:
        """Repeat each key head for all query heads that share it."""
        sharing = self.head_count // keys.shape[-3]
        if isinstance(keys, np.ndarray):
            return keys.repeat(sharing, -3)
        return keys.repeat_interleave(sharing, -3)

    def _vectors(self, side: int, x: Array, positions: np.ndarray | None) -> Array:
        """Return queries (side 0) or keys (side 1), with norms, limits and positions applied."""
        plan = self.plan
        # The weights are the weights of the forms: equal attention proves the forms.
        weights = (self.groups.query, self.groups.key)[side].swapaxes(-1, -2)
        factor = (self.query, self.key)[side]
        positions = np.arange(x.shape[-2]) if positions is None else positions
        if plan.rotary is not None and plan.turns_gains:
            vectors = factor.vectors_after_rotation(
                x, partial(plan.rotary.rotate, positions=positions)
            )
        else:
            vectors = factor.vectors(x, weights.reshape(-1, *weights.shape[-2:]))
        if plan.clip is not None:
            vectors = vectors.clip(-plan.clip, plan.clip)
        if plan.rotary is not None and not plan.turns_gains:
            vectors = plan.rotary.rotate(vectors, positions)
        if plan.positional is not None and self.positional is not None:
            added = plan.positional.rotary.rotate(self.positional[side].vectors(x), positions)
            xp = array_namespace(vectors)
            added = xp.broadcast_to(added, (*vectors.shape[:-1], added.shape[-1]))
            vectors = xp.concat([vectors, added], axis=-1)
        dtype = self.query.weight.dtype
        return vectors if vectors.dtype == dtype else vectors.astype(dtype, copy=False)

    def __repr__(self) -> str:
        heads = f"{self.head_count} heads"
        if self.key_head_count != self.head_count:
            heads += f" over {self.key_head_count} key heads"
        return (
            f"Block({self.stack} {self.plan.what}, layer {self.layer}: "
            f"{heads} of width {self.plan.query.head_width})"
        )

    def _repr_html_(self) -> str:
        plan = self.plan
        # A partial form has a reason, which explains more than the status.
        statuses = [status for status in plan.statuses if status != "partial"]
        if plan.reason:
            statuses.append(plan.reason)
        facts = {
            "attention": f"{plan.stack} {plan.kind}, layer {self.layer}, family {plan.family}",
            "heads": f"{self.head_count} over {self.key_head_count} key heads, of width "
            f"{plan.query.head_width}",
            "form": "{} × {}, rank {}".format(*self.form.shape, self.form.rank),
            "not in the form": "; ".join(omission.term for omission in self.omissions()),
            "status": "; ".join(statuses) or "ok",
        }
        rows = "".join(
            f"<tr><td>{escape(name)}</td><td>{escape(fact)}</td></tr>"
            for name, fact in facts.items()
        )
        return f'<table><caption style="text-align: left">Block</caption>{rows}</table>'


class Heads(BilinearForm):
    """The heads of a block: a sequence of `Head`, and a stack (H,) of their query-key forms.

    Scores are arrays (H,), in the order of the heads.

    Examples
    --------
    >>> import wqk
    >>> heads = wqk.open(wqk.demo_model("encoder"))[0].heads
    >>> len(heads), heads.shape, heads.symmetry.shape
    (4, (4, 128, 128), (4,))
    >>> heads[1]
    Head(1 of Block(encoder self-attention, layer 0: 4 heads of width 32))
    """

    block: Block
    _groups: BilinearForm | None  # the forms in other coordinates than the block's

    if TYPE_CHECKING:  # scores of a stack are arrays; those of a single form are numbers
        norm: Array
        symmetry: Array
        symmetry_null: Array
        directionality: Array
        directionality_excess: Array
        trace: Array

    def __init__(self, block: Block, groups: BilinearForm | None = None) -> None:
        self.__dict__.update(block=block, _groups=groups)  # the class is a frozen dataclass

    @property
    def groups(self) -> BilinearForm:
        """Forms of the heads as a stack (G, H/G), with shared factors stored once."""
        return self.block.groups if self._groups is None else self._groups

    @cached_property
    def query(self) -> Float[Array, "heads d_query rank"]:
        """First factors, (H, D, R)."""
        return self._flat(self.groups.query)

    @cached_property
    def key(self) -> Float[Array, "heads d_key rank"]:
        """Second factors, (H, D, R), repeated for heads that share a factor."""
        return self._flat(self.groups.key)

    def _flat(self, factor: Array) -> Array:
        xp = array_namespace(factor)
        matrix = tuple(factor.shape[-2:])
        repeated = xp.broadcast_to(factor, (*self.groups.stack, *matrix))
        return xp.reshape(repeated, (len(self), *matrix))

    @property
    def ov(self) -> BilinearForm:
        """The heads' output-value forms W_v W_o."""
        return self.block.at(circuit="ov")

    def sum(self) -> BilinearForm:
        """Return the layer's form, of rank G·R."""
        return self.groups.sum()

    def __len__(self) -> int:
        return math.prod(self.groups.stack)

    def __iter__(self) -> Iterator[Head]:
        return (self[index] for index in range(len(self)))

    @overload
    def __getitem__(self, index: int) -> Head: ...
    @overload
    def __getitem__(self, index: Any) -> Any: ...
    def __getitem__(self, index: Any) -> Any:
        """Return a head; several heads; or entries of the forms, as for any stack of forms."""
        if self._groups is None and is_number(index):
            return Head(self.block, index)
        return super().__getitem__(index)

    def __repr__(self) -> str:
        if self._groups is not None:
            return super().__repr__()
        return f"Heads({len(self)} of {self.block!r})"


class Head(BilinearForm):
    """One head, ``model[layer, head]``: its query-key form W_q W_kᵀ; `ov` is its W_v W_o.

    Attributes
    ----------
    block
        The block of the head.
    index
        Number of the head within the block, from 0.

    Raises
    ------
    IndexError
        The block lacks this head.

    Examples
    --------
    >>> import numpy as np, wqk
    >>> head = wqk.open(wqk.demo_model("encoder"))[1, 0]
    >>> round(head.symmetry, 2), head.T, np.asarray(head).shape
    (0.44, BilinearForm(128 × 128, rank 32), (128, 128))
    """

    block: Block
    index: int

    def __init__(self, block: Block, index: int) -> None:
        if not isinstance(block, Block):
            raise FormError(
                "a Head belongs to a model: wqk.open(ref)[layer, head]; "
                "a form of two arrays is BilinearForm(query, key)"
            )
        if not -block.head_count <= index < block.head_count:
            raise IndexError(
                f"layer {block.layer} has heads 0 to {block.head_count - 1}, got head {index}"
            )
        number = int(index) % block.head_count
        form = block.groups[divmod(number, block.groups.stack[1])]
        self.__dict__.update(block=block, index=number, query=form.query, key=form.key)

    @property
    def layer(self) -> int:
        """Number of the layer within its stack."""
        return self.block.layer

    @property
    def key_head(self) -> int:
        """Number of the key head that the head uses."""
        return self.index // (self.block.head_count // self.block.key_head_count)

    @property
    def qk(self) -> BilinearForm:
        """The query-key form as a `BilinearForm`, without the model."""
        return BilinearForm.from_factors(self.query, self.key)

    @cached_property
    def ov(self) -> BilinearForm:
        """Output-value form W_v W_o; `CheckpointError` if the family describes no such form.

        A head of linear attention may have several value heads with the same scores. The form is
        the sum over these value heads.
        """
        values = self.block.at(circuit="ov")
        per_head = max(1, len(values) // self.block.head_count)
        form: BilinearForm = values[self.index * per_head : (self.index + 1) * per_head].sum()
        return form

    def at(self, distance: int = 0, **coordinates: Any) -> BilinearForm:
        """Return the head's form in other coordinates; see `Block.at`."""
        form: BilinearForm = self.block.at(distance, **coordinates)[self.index]
        return form

    @property
    def _title(self) -> str:
        plan = self.block.plan
        return f"{plan.stack} {plan.what}, layer {self.layer}, head {self.index}"

    def __repr__(self) -> str:
        return f"Head({self.index} of {self.block!r})"
