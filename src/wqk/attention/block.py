"""One attention block of a model: its heads as bilinear forms, and the other terms of its score.

Axes: H query heads, G key heads, R head width, D width, N tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from html import escape
from typing import Literal

import numpy as np
from array_api_compat import array_namespace

from wqk._caching import cached_property
from wqk._typing import Array, Float
from wqk.attention.bands import Bands, rotary_bands
from wqk.attention.ceilings import Ceilings, ceilings
from wqk.attention.coordinates import (
    PLAIN,
    Coordinates,
    at_distance,
    augmented,
    lacks_norm,
    stacked,
    with_norm,
)
from wqk.attention.factor import Factor, load_factor
from wqk.attention.omissions import Omission, omissions
from wqk.checkpoints import Checkpoint, Part
from wqk.errors import CheckpointError, UnknownFamily
from wqk.families import AttentionPlan, Norm, Side
from wqk.forms import BilinearForm


class Block:
    """One attention block of a model; `wqk.open` makes them.

    Weights are read when they are first needed, and once. The linear parts of norms between
    projection and score, gains and centering, are folded into the forms. A token's own scale is
    not; `queries` and `keys` include it.

    Attributes
    ----------
    checkpoint
        Where the weights are.
    plan
        Which weights they are, and what else the score holds: stack, kind, layer, scale, rotary
        positions, status.

    Examples
    --------
    >>> import wqk
    >>> block = wqk.open(wqk.demo_model("encoder"))[0]
    >>> block
    Block(encoder self-attention, layer 0: 4 heads of width 32)
    >>> block[2].qk
    BilinearForm(128 × 128, rank 32)
    """

    def __init__(self, checkpoint: Checkpoint, plan: AttentionPlan) -> None:
        self.checkpoint, self.plan = checkpoint, plan
        self._stored: dict[Part, Array] = {}

    def read(self, parts: Sequence[Part]) -> list[Array]:
        """Parts of the checkpoint, as `Checkpoint.read` gives them; each is read once."""
        missing = [part for part in dict.fromkeys(parts) if part not in self._stored]
        if missing:
            self._stored |= zip(missing, self.checkpoint.read(missing), strict=True)
        return [self._stored[part] for part in parts]

    def _factors(self, *sides: Side) -> list[Factor]:
        """The factors of these sides, read in one request.

        `NonFiniteWeights` if a weight or bias has NaN or infinite entries.
        """
        self.read([part for side in sides for part in side.parts])
        return [load_factor(self._stored, side, self.checkpoint.name) for side in sides]

    @property
    def layer(self) -> int:
        """The layer's number within its stack, from 0."""
        return self.plan.layer

    @property
    def stack(self) -> str:
        """``encoder``, ``decoder``, ``vision``, …."""
        return self.plan.stack

    @property
    def kind(self) -> str:
        """``self`` or ``cross``."""
        return self.plan.kind

    @property
    def head_count(self) -> int:
        """Number of query heads, H."""
        return self.plan.query.heads

    @property
    def key_head_count(self) -> int:
        """Number of key heads, G."""
        return self.plan.key.heads

    @cached_property
    def _query_key(self) -> tuple[Factor, Factor]:
        query, key = self._factors(self.plan.query, self.plan.key)
        return query, key

    @property
    def query(self) -> Factor:
        """The queries' weight (H, R, D), and what comes with it."""
        return self._query_key[0]

    @property
    def key(self) -> Factor:
        """The keys' weight (G, R, D), and what comes with it.

        Query head h meets key head h // (H/G).
        """
        return self._query_key[1]

    @cached_property
    def positional(self) -> tuple[Factor, Factor] | None:
        """Queries and keys of the dimensions of latent attention that hold only positions.

        They are not in the form.
        """
        if self.plan.positional is None:
            return None
        query, key = self._factors(self.plan.positional.query, self.plan.positional.key)
        return query, key

    @cached_property
    def _value_output(self) -> tuple[Factor, Factor]:
        if self.plan.value is None or self.plan.output is None:
            raise CheckpointError(
                f"layer {self.layer} of the {self.stack}: family {self.plan.family} describes no "
                "values and outputs, or the checkpoint lacks them"
            )
        value, output = self._factors(self.plan.value, self.plan.output)
        return value, output

    @cached_property
    def heads(self) -> BilinearForm:
        """All heads as a stack (G, H/G): row g holds the query heads that share key head g."""
        return stacked(self.query.weight, self.key.weight)

    @cached_property
    def ov(self) -> BilinearForm:
        """The output-value forms W_v W_o of all heads as a stack, like `heads`.

        `CheckpointError` if the family describes no values and outputs, or they are not there.
        """
        value, output = self._value_output
        return stacked(value.weight, output.weight)

    def __getitem__(self, index: int) -> Head:
        if not -self.head_count <= index < self.head_count:
            raise IndexError(
                f"layer {self.layer} has heads 0 to {self.head_count - 1}, got head {index}"
            )
        return Head(self, index % self.head_count)

    def __len__(self) -> int:
        return self.head_count

    def __iter__(self) -> Iterator[Head]:
        return (self[index] for index in range(self.head_count))

    def head(self, index: int) -> BilinearForm:
        """One head's query-key form, D × D of rank R; `IndexError` if there is no such head."""
        return self[index].qk

    def form(
        self,
        *,
        distance: int = 0,
        fold_norm: bool = False,
        bias: bool = False,
        circuit: Literal["qk", "ov"] = "qk",
    ) -> BilinearForm:
        """The layer's form: the sum over its heads, of rank G·R (paper, S20).

        The parameters choose another than the plain W_q W_kᵀ: see `wqk.attention.coordinates`,
        which also raises.
        """
        coordinates = Coordinates(circuit, fold_norm, bias, (distance,))
        if coordinates == PLAIN:
            return self._form
        ((_, form),) = self.forms(coordinates)
        return form.sum()

    @cached_property
    def _form(self) -> BilinearForm:
        return self.heads.sum()

    def forms(
        self, coordinates: Coordinates = PLAIN, every_bias: bool = False
    ) -> Iterator[tuple[int, BilinearForm]]:
        """Each distance with the forms of all heads, as a stack like `heads`, made one by one.

        With ``every_bias``, the key's bias enters also where the softmax does not see it, as in
        scores that are compared across queries.

        Raises `CheckpointError` if the block has no values and outputs, or no rotary positions.
        """
        plan = self.plan
        of_values = coordinates.circuit == "ov"
        factors = self._value_output if of_values else self._query_key
        norms = (plan.value, None) if of_values else (plan.query, plan.key)
        fold = coordinates.fold_norm and not lacks_norm(plan, coordinates)
        left, right = (
            self.linear(factor, side.input_norm if fold and side else None)
            for factor, side in zip(factors, norms, strict=True)
        )
        if coordinates.bias:
            if not (every_bias or of_values) and plan.rule.guess and right[1] is not None:
                raise CheckpointError(
                    f"layer {self.layer} of the {self.stack} was guessed from tensor names; "
                    "the key's bias counts only with rotary positions, and whether it has these is "
                    "not known; leave out the biases, or describe the model in a family file"
                )
            keeps_right_bias = not of_values and (every_bias or plan.rotary is not None)
            plain = stacked(
                augmented(*left), augmented(right[0], right[1] if keeps_right_bias else None)
            )
        else:
            plain = stacked(left[0], right[0])
        return ((n, at_distance(plain, plan, n)) for n in coordinates.distances)

    def weights(self, circuit: Literal["qk", "ov"] = "qk") -> tuple[Array, Array]:
        """The two weights of a circuit, (H, R, D) and (G, R, D)."""
        left, right = self._query_key if circuit == "qk" else self._value_output
        return left.weight, right.weight

    def linear(self, factor: Factor, norm: Norm | None) -> tuple[Array, Array | None]:
        """A factor's weight (heads, R, D) and bias (heads, R), with the norm before it folded in.

        They act on normalized vectors before gain and bias.
        """
        weight, bias = factor.weight, factor.bias
        if norm is None:  # the residual stream itself; or the output, which no norm follows
            return weight, bias
        gain, *shift = self.read([*norm.gain, *norm.bias])
        gain = gain + gain.dtype.type(norm.offset)
        return with_norm(weight, bias, gain, shift[0] if shift else None, norm.kind)

    def ceiling(self, distances: Sequence[int] = (0,)) -> Ceilings | None:
        """The largest scores that any input can produce; None if they have no bound.

        See `wqk.attention.ceilings`.
        """
        return ceilings(self, distances)

    def bands(self) -> Bands:
        """How each head's weight is spread over rotary planes; `CheckpointError` without these."""
        return rotary_bands(self)

    def omissions(self, coordinates: Coordinates = PLAIN) -> tuple[Omission, ...]:
        """The terms of the score that the forms in these coordinates leave out."""
        return tuple(omissions(self.plan, coordinates))

    def with_weights(self, query: Array, key: Array, biases: bool = True) -> Block:
        """The block with other stored weights, (H, R, D) and (G, R, D), with or without biases."""
        sides = []
        for side, weight in ((self.query, query), (self.key, key)):
            bias = side.stored_bias if biases else None
            sides.append(replace(side, stored_weight=weight, stored_bias=bias))
        changed = copy(self)
        for name in ("heads", "_form"):
            changed.__dict__.pop(name, None)
        changed.__dict__["_query_key"] = tuple(sides)
        return changed

    def queries(
        self, x: Float[Array, "*batch tokens d"], positions: np.ndarray | None = None
    ) -> Float[Array, "*batch heads tokens width"]:
        """The queries of some inputs, as they enter the score.

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
        """The keys, as `queries`; one per query head, several of which may share a key head."""
        self._require_known("a key")
        return self._shared(self._vectors(1, y, positions))

    def products(
        self,
        x: Float[np.ndarray, "*batch queries d"],
        y: Float[np.ndarray, "*batch keys d"],
        positions: tuple[np.ndarray, np.ndarray] | None = None,
    ) -> Float[np.ndarray, "*batch heads queries keys"]:
        """The products q·k of queries and keys before they are scaled.

        By default at distance 0; else at these positions of the queries and of the keys.
        """
        at = positions or (np.zeros(x.shape[-2]), np.zeros(y.shape[-2]))
        queries, keys = self._vectors(0, x, at[0]), self._vectors(1, y, at[1])
        return np.asarray(queries @ self._shared(keys).swapaxes(-1, -2))

    def logits(
        self,
        x: Float[np.ndarray, "*batch queries d"],
        y: Float[np.ndarray, "*batch keys d"],
        distance: int | None = None,
    ) -> Float[np.ndarray, "*batch heads queries keys"]:
        """The scores of queries x_i and keys y_j: scaled, and soft-capped if the model does.

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
        queries, keys = x.shape[-2], y.shape[-2]
        at = (np.arange(queries), np.arange(keys))
        if distance is not None:
            at = (np.full(queries, distance), np.zeros(keys, int))
        return self.scores(self.products(x, y, at))

    def scores(self, products: np.ndarray) -> np.ndarray:
        """Products q·k as scores: scaled, and soft-capped if the model does."""
        scores, cap = self.plan.scale * products, self.plan.softcap
        return np.asarray(cap * np.tanh(scores / cap) if cap else scores)

    def _require_known(self, what: str) -> None:
        if self.plan.rule.guess:
            raise UnknownFamily(
                f"{what} needs the model's scale and positions, which are unknown: the family was "
                "guessed from tensor names; describe the model in a family file"
            )

    def _shared(self, keys: Array) -> Array:
        """Each key head for all query heads that meet it."""
        sharing = self.head_count // keys.shape[-3]
        if isinstance(keys, np.ndarray):
            return keys.repeat(sharing, -3)
        return keys.repeat_interleave(sharing, -3)

    def _vectors(self, side: int, x: Array, positions: np.ndarray | None) -> Array:
        plan = self.plan
        # The weights of the forms, so that attention that equals a model's proves the forms.
        weights = (self.heads.query, self.heads.key)[side].swapaxes(-1, -2)
        factor = (self.query, self.key)[side]
        vectors = factor.vectors(x, weights.reshape(-1, *weights.shape[-2:]))
        if plan.clip is not None:
            vectors = vectors.clip(-plan.clip, plan.clip)
        positions = np.arange(x.shape[-2]) if positions is None else positions
        if plan.rotary is not None:
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
            f"Block({self.stack} {self.kind}-attention, layer {self.layer}: "
            f"{heads} of width {self.plan.query.head_width})"
        )

    def _repr_html_(self) -> str:
        plan = self.plan
        facts = {
            "attention": f"{plan.stack} {plan.kind}, layer {self.layer}, family {plan.family}",
            "heads": f"{self.head_count} over {self.key_head_count} key heads, of width "
            f"{plan.query.head_width}",
            "form": f"{self.form().shape[0]} × {self.form().shape[1]}, rank {self.form().rank}",
            "not in the form": "; ".join(omission.term for omission in self.omissions()),
            "status": "; ".join(
                [*(one for one in plan.statuses if one != "partial"), *filter(None, [plan.reason])]
            )
            or "ok",
        }
        rows = "".join(
            f"<tr><td>{escape(name)}</td><td>{escape(fact)}</td></tr>"
            for name, fact in facts.items()
        )
        return f'<table><caption style="text-align: left">Block</caption>{rows}</table>'


@dataclass(frozen=True)
class Head:
    """One head of a block, with its two forms."""

    block: Block
    index: int

    @property
    def key_head(self) -> int:
        """The number of its key head."""
        return self.index // (self.block.head_count // self.block.key_head_count)

    @property
    def qk(self) -> BilinearForm:
        """The query-key form W_q W_kᵀ, D × D of rank R."""
        return BilinearForm.from_factors(
            self.block.query.weight[self.index].T, self.block.key.weight[self.key_head].T
        )

    @property
    def ov(self) -> BilinearForm:
        """The output-value form W_v W_o; `CheckpointError` if the block's family describes none."""
        form: BilinearForm = self.block.ov[divmod(self.index, self.block.ov.stack[1])]
        return form

    def __repr__(self) -> str:
        return f"Head({self.index} of {self.block!r})"
