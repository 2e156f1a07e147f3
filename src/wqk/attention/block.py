"""One block's attention: its heads as bilinear forms, and the other terms of its score.

Axes: H query heads, G key heads, R head width, D width, N tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
from array_api_compat import array_namespace

from wqk._caching import cached_property
from wqk._typing import Array, FilePath, Float
from wqk.attention.factor import Factor, load_factor
from wqk.checkpoints import open_checkpoint
from wqk.checkpoints.options import check_options
from wqk.errors import CheckpointError, UnknownFamily, concerning
from wqk.families import find_family, load_family, plan, with_head_counts
from wqk.families.candidates import POSITIONAL, beside, candidates
from wqk.forms import BilinearForm

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from typing import Unpack

    from wqk.checkpoints import Checkpoint
    from wqk.checkpoints.options import HubOptions
    from wqk.families import AttentionPlan


@dataclass(frozen=True, eq=False, repr=False)
class Attention:
    """The queries and keys of one block, as read from a checkpoint.

    The linear parts of norms between projection and score, gains and centering, are folded into the
    forms. A token's own scale is not; `queries` and `keys` include it.

    Attributes
    ----------
    plan
        Its origin: stack, kind, layer, scale, rotary positions, status.
    query, key
        Weights (H, R, D) and (G, R, D), and what comes with them. Query head h meets key head
        h // (H/G).
    positional
        The same for the dimensions that hold only positions, if latent attention has some and they
        were read.
    """

    plan: AttentionPlan
    query: Factor
    key: Factor
    positional: tuple[Factor, Factor] | None = None

    @property
    def layer(self) -> int:
        """The layer's number within its stack, from 0."""
        return self.plan.layer

    @property
    def head_count(self) -> int:
        """Number of query heads, H."""
        return int(self.query.weight.shape[0])

    @property
    def key_head_count(self) -> int:
        """Number of key heads, G."""
        return int(self.key.weight.shape[0])

    @cached_property
    def heads(self) -> BilinearForm:
        """All heads as a stack (G, H/G): row g holds the query heads that share key head g."""
        heads, width, d_query = self.query.weight.shape
        groups = self.key_head_count
        query = self.query.weight.reshape(groups, heads // groups, width, d_query)
        return BilinearForm.from_factors(
            query.swapaxes(-1, -2), self.key.weight[:, None].swapaxes(-1, -2)
        )

    def head(self, index: int) -> BilinearForm:
        """One head's form, D × D of rank R; `IndexError` if there is no such head."""
        if not -self.head_count <= index < self.head_count:
            raise IndexError(f"head {index} of {self.head_count}")
        key_head = index % self.head_count // (self.head_count // self.key_head_count)
        return BilinearForm.from_factors(self.query.weight[index].T, self.key.weight[key_head].T)

    @cached_property
    def form(self) -> BilinearForm:
        """The layer's form: the sum over its heads, of rank G·R (paper, S20)."""
        return self.heads.sum()

    def with_weights(self, query: Array, key: Array, biases: bool = True) -> Attention:
        """The block with other stored weights, (H, R, D) and (G, R, D), with or without biases."""
        sides = []
        for side, weight in ((self.query, query), (self.key, key)):
            bias = side.stored_bias if biases else None
            sides.append(replace(side, stored_weight=weight, stored_bias=bias))
        return replace(self, query=sides[0], key=sides[1])

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
        >>> attention = wqk.read_attention(wqk.demo_model("decoder"), layer=0)
        >>> attention.queries(np.ones((5, 128), np.float32)).shape
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
        >>> attention = wqk.read_attention(wqk.demo_model("decoder"), layer=0)
        >>> x = np.random.default_rng(0).standard_normal((5, 128))
        >>> attention.logits(x, x).shape
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
        sharing = self.head_count // self.key_head_count
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
        if plan.positional is not None:
            if self.positional is None:
                raise CheckpointError(
                    f"layer {self.layer} of the {plan.stack}: the part of its queries and keys "
                    "that holds positions was not read; load the block with positions=True"
                )
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
            f"Attention({self.plan.stack} {self.plan.kind}, layer {self.layer}: "
            f"{heads}, {self.form.shape[0]} × {self.form.shape[1]})"
        )

    def _repr_html_(self) -> str:
        plan = self.plan
        facts = {
            "attention": f"{plan.stack} {plan.kind}, layer {self.layer}, family {plan.family}",
            "heads": f"{self.head_count} over {self.key_head_count} key heads, of width "
            f"{self.query.weight.shape[1]}",
            "form": f"{self.form.shape[0]} × {self.form.shape[1]}, rank {self.form.rank}",
            "score scale": f"{plan.scale:.4g}, not part of the form",
            "positions": "rotary" if plan.rotary else plan.position or "none in the score",
        }
        if plan.rule.guess:
            facts |= dict.fromkeys(("score scale", "positions"), "not known: the family is guessed")
        facts["status"] = (
            "; ".join(
                [one for one in plan.statuses if one != "partial"]
                + [plan.reason] * bool(plan.reason)
            )
            or "ok"
        )
        rows = "".join(
            f"<tr><td>{escape(name)}</td><td>{escape(fact)}</td></tr>"
            for name, fact in facts.items()
        )
        return f'<table><caption style="text-align: left">Attention</caption>{rows}</table>'


def attention_plans(
    checkpoint: Checkpoint,
    family: FilePath | None = None,
    heads_per_layer: int | None = None,
    key_heads: int | None = None,
    layers: Collection[int] | None = None,
) -> list[AttentionPlan]:
    """Every attention block of a checkpoint, in order, without reading weights.

    With ``layers``, only the blocks of these layers, of every stack. The other arguments are as for
    `read_attention`.

    Raises
    ------
    UnknownFamily
        No family knows the model, and none can be guessed; or the given file is not a family.
    CheckpointError
        Tensors are missing, or do not fit the configuration; or there is no such layer.
    """
    chosen = load_family(family) if family else find_family(checkpoint, heads_per_layer is None)
    with concerning(checkpoint.name):
        plans = plan(checkpoint, with_head_counts(chosen, checkpoint, heads_per_layer, key_heads))
        if layers is None:
            return plans
        there = {one.layer for one in plans}
        missing = sorted(set(layers) - there)
        if missing or not layers:
            what = f"no layer {missing[0]}" if missing else "no layer was chosen"
            raise CheckpointError(f"{what}; layers are numbered from {min(there)} to {max(there)}")
        return [one for one in plans if one.layer in layers]


def unread_attention(checkpoint: Checkpoint, plans: Sequence[AttentionPlan]) -> list[str]:
    """Names of tensors that look like queries and keys, but that no plan reads.

    Such as cross-attention that a family does not describe, another tower, or a pooling head.
    """
    read = {part.name for plan in plans for part in plan.parts}
    tensors = checkpoint.tensors()
    named = candidates(tensors)
    unread = [c for c in named if read.isdisjoint(c.tensors) and not c.words & POSITIONAL]
    return [c.query for c in unread if not beside(c, named, tensors).recurrent]


def load_attention(
    checkpoint: Checkpoint, plan: AttentionPlan, positions: bool = False
) -> Attention:
    """Read one block's queries and keys, in one request, as arrays of the checkpoint's library.

    Parameters
    ----------
    checkpoint, plan
        The plan is one of the checkpoint's own, from `attention_plans`.
    positions
        Whether to also read the dimensions of latent attention that hold only positions: they are
        not in the form, but `Attention.logits` needs them.

    Raises
    ------
    NonFiniteWeights
        A weight or bias has NaN or infinite entries; says which tensor and how many.
    """
    sides = [plan.query, plan.key]
    if positions and plan.positional is not None:
        sides += [plan.positional.query, plan.positional.key]
    wanted = list(dict.fromkeys(part for side in sides for part in side.parts))
    stored = dict(zip(wanted, checkpoint.read(wanted), strict=True))
    query, key, *apart = (load_factor(stored, side, checkpoint.name) for side in sides)
    return Attention(plan, query, key, (apart[0], apart[1]) if apart else None)


def read_attention(
    ref: Any,
    layer: int,
    *,
    stack: str | None = None,
    kind: str = "self",
    family: FilePath | None = None,
    heads_per_layer: int | None = None,
    key_heads: int | None = None,
    **hub: Unpack[HubOptions],
) -> Attention:
    """The attention of one layer of a checkpoint.

    Parameters
    ----------
    ref
        As for `open_checkpoint`.
    layer
        Number within its stack, from 0; negative numbers count from the end.
    stack, kind
        Which attention, where a model has several: ``encoder`` or ``decoder``, ``self`` or
        ``cross``.
    family
        A family file to use instead of the model type's own.
    heads_per_layer, key_heads
        Numbers of query and key heads, where the configuration does not have them.
    **hub
        ``revision``, ``token``, ``cache_dir`` and so on, for `open_checkpoint`.

    Raises
    ------
    CheckpointError
        There is no such layer, or the stack has to be named.

    Examples
    --------
    >>> import wqk
    >>> attention = wqk.read_attention(wqk.demo_model("encoder"), layer=0)
    >>> attention.head(2)
    BilinearForm(128 × 128, rank 32)
    """
    check_options("read_attention", hub)
    checkpoint = open_checkpoint(ref, **hub)
    plans = attention_plans(checkpoint, family, heads_per_layer, key_heads)
    chosen = attention_plan(checkpoint, plans, layer, stack, kind)
    return load_attention(checkpoint, chosen, positions=True)


def attention_plan(
    checkpoint: Checkpoint,
    plans: Sequence[AttentionPlan],
    layer: int,
    stack: str | None = None,
    kind: str = "self",
) -> AttentionPlan:
    """One layer's of a checkpoint's plans; arguments and errors as for `read_attention`."""
    plans = [p for p in plans if p.kind == kind and stack in (None, p.stack)]
    stacks = list(dict.fromkeys(p.stack for p in plans))
    if len(stacks) > 1:
        raise CheckpointError(
            f"{checkpoint.name}: has several stacks; choose one with stack="
            f"{' or '.join(map(repr, stacks))}"
        )
    by_layer = {p.layer: p for p in plans}
    wanted = layer if layer >= 0 else max(by_layer, default=-1) + 1 + layer
    if wanted not in by_layer:
        has = f" of the {stacks[0]}, which has {len(plans)}" if stacks else ""
        raise CheckpointError(f"{checkpoint.name}: no {kind}-attention in layer {layer}{has}")
    return by_layer[wanted]
