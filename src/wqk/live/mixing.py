"""Replace attention scores by parts of the scores while a model of transformers runs.

The logits of attention before mask and bias, S_ij = x_i W x_jᵀ times the model's scale, become u S
+ v M, where M is a mirror image of S. The usual mirror is the transpose, which exchanges query and
key of a pair: u S + v Sᵀ is a (S + Sᵀ)/2 + b (S − Sᵀ)/2 for u = (a + b)/2 and v = (a − b)/2. Masks
and position terms do not change. Therefore in a causal model only the lower triangle of Sᵀ has an
effect. S contains rotary positions and norms. For the control, a random involution that keeps
second moments maps the inputs (`wqk.live.reflections`).

Weights do not change. A model that uses transformers' attention interface adds a mask to the scaled
products of queries and keys; the change of the products is added to this mask.

Axes: B blocks, H query heads, G key heads, N tokens, R head width, D width.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import numpy as np

from wqk._typing import Array, Float
from wqk.errors import CheckpointError, UnknownFamily
from wqk.families import AttentionPlan
from wqk.live.addresses import parent_of
from wqk.live.reflections import InputRoots, input_roots, involution
from wqk.model import Model

# The name under which the attention that mixes parts is registered with transformers.
NAME = "wqk_parts"

# The argument of attention modules that takes the inputs.
INPUTS = "hidden_states"

Mirror = Literal["transpose", "next head", "involution", "rank"]


class ScorePart(NamedTuple):
    """Replacement of the scores S: ``whole`` times S plus ``mirrored`` times a mirror of S.

    Attributes
    ----------
    name
        Name of the part in tables.
    whole, mirrored
        Factors of S and of the mirror.
    mirror
        ``transpose``: Sᵀ. ``next head``: the transpose of the next head's scores. ``involution``:
        scores of inputs mapped by a random involution. ``rank``: scores of forms truncated to a
        rank.
    number
        Number of the random involution, or the rank.
    size_of
        If not empty, the part is random, with the size of the symmetric or the skew part in each
        head; the factors are not used.
    """

    name: str
    whole: float = 0.0
    mirrored: float = 0.0
    mirror: Mirror = "transpose"
    number: int = 0
    size_of: Literal["", "symmetric", "skew"] = ""


def mixed(
    name: str, a: float, b: float, mirror: Mirror = "transpose", number: int = 0
) -> ScorePart:
    """Return ``a`` times the even half of the scores plus ``b`` times the odd half.

    Examples
    --------
    >>> mixed("skew", 0, 1)[:3]
    ('skew', 0.5, -0.5)
    """
    return ScorePart(name, (a + b) / 2, (a - b) / 2, mirror, number)


WHOLE, NONE, HALF = ScorePart("whole", 1.0), ScorePart("none"), ScorePart("half", 0.5)
SYMMETRIC, SKEW = mixed("symmetric", 1, 0), mixed("skew", 0, 1)


class ScorePlace(NamedTuple):
    """Heads with changed scores: of a stack, of a layer of the stack, or one head."""

    stack: str
    layer: int | None = None
    head: int | None = None


@dataclass
class SumsOfSquares:
    """Sums of squares of scores and of their mirror, over a text."""

    mirror: float = 0.0
    scores: float = 0.0


class Mixer:
    """Run a model with parts of the scores; use within ``installed()``.

    In the passes that follow, ``part`` replaces the scores of the heads in ``place``.

    Parameters
    ----------
    opened
        A `Model` opened from a `transformers` model.
    seed
        Seed of random involutions.
    """

    def __init__(self, opened: Model, seed: int = 0) -> None:
        opened.require_softmax()
        self.model = cast("Any", opened.ref)
        self.opened, self.seed = opened, seed
        if not (hasattr(self.model, "config") and hasattr(self.model, "set_attn_implementation")):
            raise CheckpointError(
                f"{opened.name}: parts need a model of transformers, "
                f"got {type(self.model).__name__}"
            )
        if not self.model._can_set_attn_implementation():
            raise UnknownFamily(
                f"{opened.name}: {type(self.model).__name__} computes its attention itself, not "
                "through transformers' attention interface, so that its scores cannot be replaced"
            )
        self.modules: dict[Any, AttentionPlan] = {
            self.model.get_submodule(parent_of(plan)): plan
            for plan in opened.plans
            if plan.kind == "self"
        }
        self.place, self.part = ScorePlace(""), WHOLE
        self.roots: dict[Any, InputRoots] = {}  # by module
        self._checked: set[Any] = set()  # modules that add masks and scores in the same way
        self._probing = False  # whether a module runs only for the scores of reflected inputs
        self._mirrored: dict[Any, Array] = {}  # transposed scores, by module
        self._rank_projections: dict[tuple[Any, int], Array] = {}  # by module and rank
        self._moments: dict[Any, np.ndarray] = {}  # second moments of inputs, by module
        self._involutions: dict[tuple[int, int], Array] = {}  # by width and number
        self._squares: dict[int, SumsOfSquares] | None = None  # by layer, while measured

    @contextmanager
    def installed(self) -> Iterator[Mixer]:
        """Install this attention in the model, and restore the model's attention at the end."""
        from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
        from transformers.masking_utils import eager_mask

        implementations = [  # of the model and of the models within it
            (module.config, module.config._attn_implementation)
            for module in self.model.modules()
            if isinstance(module, PreTrainedModel)
        ]
        AttentionInterface.register(NAME, self.attend)
        AttentionMaskInterface.register(NAME, eager_mask)
        hooks = [
            module.register_forward_pre_hook(self._attend_to_reflected, with_kwargs=True)
            for module in self.modules
        ]
        training = self.model.training
        try:
            self.model.set_attn_implementation(NAME)
            self.model.eval()
            yield self
        finally:
            self.model.train(training)
            for config, name in implementations:
                config._attn_implementation_internal = name
            for hook in hooks:
                hook.remove()

    def measure_inputs(self, run: Callable[[], object]) -> None:
        """Measure the second moments of all blocks' inputs, which random involutions keep.

        Parameters
        ----------
        run
            Function that runs the model on its text, with unchanged scores.
        """
        moments: dict[Any, Array] = {}

        def add(module: Any, args: Any, kwargs: Any) -> None:
            inputs = _inputs_of(args, kwargs).flatten(0, -2).double()
            moments[module] = moments.get(module, 0) + inputs.mT @ inputs

        hooks = [module.register_forward_pre_hook(add, with_kwargs=True) for module in self.modules]
        self.part = WHOLE
        try:
            run()
        finally:
            for hook in hooks:
                hook.remove()
        self._moments = {module: sums.cpu().numpy() for module, sums in moments.items()}
        for module, sums in self._moments.items():
            self.roots[module] = input_roots(sums)

    def raise_moments(self, stack: str, least_moments: Mapping[int, float]) -> None:
        """Raise small second moments of layers' inputs to a share of the largest, by layer."""
        for module, plan in self.modules.items():
            if plan.stack == stack and plan.layer in least_moments:
                self.roots[module] = input_roots(self._moments[module], least_moments[plan.layer])

    def control_sizes(self, run: Callable[[], object], stack: str, number: int) -> dict[int, float]:
        """Measure |M|²/|S|² of a random involution's M in each layer of a stack.

        The sums of squares are over all heads and all pairs of tokens of the text. The model runs
        with unchanged scores.

        Parameters
        ----------
        run
            Function that runs the model on its text.
        stack
            The stack of the measured layers.
        number
            Number of the involution, as in `ScorePart`.
        """
        self.place, self.part = ScorePlace(stack), ScorePart("", 1, 0, "involution", number)
        squares = self._squares = {}
        try:
            run()
        finally:
            self._squares = None
        return {layer: sums.mirror / sums.scores for layer, sums in squares.items() if sums.scores}

    def require_all_seen(self) -> None:
        """Raise `UnknownFamily` if a self-attention did not run through the interface."""
        for module, plan in self.modules.items():
            if module not in self._checked:
                raise UnknownFamily(
                    f"{self.opened.name}: {type(module).__name__} of layer {plan.layer} did "
                    "not run through transformers' attention interface, so that its scores cannot "
                    "be replaced"
                )

    def _is_changed(self, module: Any) -> bool:
        """Return True if the part replaces scores of this module."""
        plan = self.modules.get(module)
        return (
            plan is not None
            and self.part != WHOLE
            and self.place.stack == plan.stack
            and self.place.layer in (None, plan.layer)
        )

    def _attend_to_reflected(self, module: Any, args: Any, kwargs: Any) -> None:
        """Run a module on its reflected inputs first, if the part needs their scores."""
        if self.part.mirror != "involution" or self._probing or not self._is_changed(module):
            return
        reflected = self._reflected(module, _inputs_of(args, kwargs))
        self._probing = True
        try:
            if args:
                module(reflected, *args[1:], **kwargs)
            else:
                module(**{**kwargs, INPUTS: reflected})
        finally:
            self._probing = False

    def _reflected(self, module: Any, inputs: Float[Array, "B N D"]) -> Float[Array, "B N D"]:
        """Return the inputs of a block, mapped by the part's involution.

        Square roots and involutions are stored in the number type and on the device of the inputs.
        """
        import torch

        roots, width = self.roots.get(module), inputs.shape[-1]
        assert roots is not None, "measure_inputs() comes before a random involution"
        if isinstance(roots.root, np.ndarray):
            roots = InputRoots(
                torch.from_numpy(roots.root).to(inputs),
                torch.from_numpy(roots.inverse_root).to(inputs),
            )
            self.roots[module] = roots
        key = width, self.part.number
        if key not in self._involutions:
            drawn = involution(width, (self.seed, self.part.number))
            self._involutions[key] = torch.from_numpy(drawn).to(inputs)
        return roots.reflect(inputs, self._involutions[key])

    def attend(
        self,
        module: Any,
        query: Float[Array, "B H N R"],
        key: Float[Array, "B G N R"],
        value: Array,
        attention_mask: Array | None,
        scaling: float | None = None,
        **options: Any,
    ) -> Any:
        """Compute attention with the model's code and changed scores.

        `transformers` calls this method instead of the model's attention; the change of the scores
        is added to the mask.
        """
        import torch

        eager_attention = _eager_attention_of(module)

        def run(query: Array, mask: Array | None) -> Any:
            return eager_attention(module, query, key, value, mask, scaling=scaling, **options)

        if self._probing:
            self._mirrored[module] = scores_of(query, key, scaling).swapaxes(-1, -2)
            return query.new_zeros(*query.shape[:3], value.shape[-1]).swapaxes(1, 2), None
        if module in self.modules and module not in self._checked:
            scores_as_mask = _capped(scores_of(query, key, scaling), options)
            if attention_mask is not None:
                scores_as_mask = attention_mask + scores_as_mask
            expected, *_ = run(query, attention_mask)
            actual, *_ = run(0 * query, scores_as_mask)
            self._require_masks_are_added(module, expected, actual)
        if not self._is_changed(module):
            return run(query, attention_mask)
        scores = scores_of(query, key, scaling)
        change = self._mixed(module, scores, query, key, scaling) - scores
        if self.place.head is not None:
            is_changed = torch.arange(scores.shape[1], device=scores.device) == self.place.head
            change = change * is_changed[:, None, None]
        if options.get("softcap") is not None:
            change = _capped(scores + change, options) - _capped(scores, options)
        return run(query, change if attention_mask is None else attention_mask + change)

    def _require_masks_are_added(self, module: Any, expected: Array, actual: Array) -> None:
        """Raise `UnknownFamily` if scores that are passed as a mask give other outputs.

        Parameters
        ----------
        module
            The module; a module is checked only once.
        expected, actual
            Outputs of the module with the scores of queries and keys, and with the same scores as a
            mask.
        """
        import torch

        if not torch.allclose(expected, actual, rtol=1e-3, atol=1e-4):
            raise UnknownFamily(
                f"{self.opened.name}: {type(module).__name__} is no softmax of scaled products "
                "plus a mask, so that its scores cannot be replaced"
            )
        self._checked.add(module)

    def _mixed(
        self,
        module: Any,
        scores: Float[Array, "B H N N"],
        query: Float[Array, "B H N R"],
        key: Float[Array, "B G N R"],
        scaling: float | None,
    ) -> Float[Array, "B H N N"]:
        """Return the part that replaces the scores: u S + v M, or a part of a random size."""
        part = self.part
        transposed = scores.swapaxes(-1, -2)
        if part.mirror == "involution":
            mirrored = self._mirrored.pop(module)
            if self._squares is not None:
                self._add_squares(module, mirrored, scores)
        elif part.mirror == "rank":
            projections = self._projections_to_rank(module, query)
            mirrored = scores_of(query @ projections, key, scaling)
        else:
            mirrored = transposed if part.mirror == "transpose" else transposed.roll(-1, 1)
        if not part.size_of:
            return part.whole * scores + part.mirrored * mirrored
        all_but_heads = (0, 2, 3)
        symmetric_squares = ((scores + transposed) / 2).square().sum(all_but_heads)
        symmetric_share = symmetric_squares / scores.square().sum(all_but_heads)
        if part.size_of == "symmetric":
            share, sign = symmetric_share, 1
        else:
            share, sign = 1 - symmetric_share, -1
        # If M is as large as S, the sum of squares of p S + √(p(1 − p)) M is the share p of that of
        # S, and p S + √(p(1 − p)) M is orthogonal to the rest of S.
        share = share[:, None, None]
        return share * scores + sign * (share * (1 - share)).sqrt() * mirrored

    def _add_squares(self, module: Any, mirror: Array, scores: Array) -> None:
        """Add the sums of squares of a mirror and of scores to the sums of the layer."""
        assert self._squares is not None
        sums = self._squares.setdefault(self.modules[module].layer, SumsOfSquares())
        sums.mirror += float(mirror.double().square().sum())
        sums.scores += float(scores.double().square().sum())

    def _projections_to_rank(self, module: Any, like: Array) -> Array:
        """Return matrices (H, R, R) that truncate the heads' forms to a rank."""
        import torch

        plan, rank = self.modules[module], self.part.number
        if (module, rank) not in self._rank_projections:
            block = self.opened.block(plan.layer, stack=plan.stack)
            projections = []
            for head in range(plan.query.heads):
                form = block[head].qk
                projections.append(projection_to_rank(form.query, form.key, rank))
            stacked = torch.from_numpy(np.stack(projections))
            self._rank_projections[module, rank] = stacked.to(like)
        return self._rank_projections[module, rank]


def require_one_form(name: str, plan: AttentionPlan) -> None:
    """Raise `UnknownFamily` if a head has several forms, and therefore no single rank."""
    if plan.rotary is not None or plan.axial is not None:
        reason = "rotary positions"
    elif plan.query.norm is not None or plan.key.norm is not None:
        reason = "norms of queries and keys"
    else:
        return
    raise UnknownFamily(
        f"{name}: with {reason} a head has no single form whose rank could be cut; leave out rank"
    )


def projection_to_rank(
    query: Float[Array, "D R"], key: Float[Array, "D R"], rank: int
) -> np.ndarray:
    """Return P (R, R) such that A P Bᵀ is the best approximation of A Bᵀ with a given rank.

    Examples
    --------
    >>> query, key = np.diag([3.0, 2.0, 1.0]), np.eye(3)
    >>> (query @ projection_to_rank(query, key, 2) @ key.T).round(12).tolist()
    [[3.0, 0.0, 0.0], [0.0, 2.0, 0.0], [0.0, 0.0, 0.0]]
    """
    _, query_triangle = np.linalg.qr(np.asarray(query, np.float64))
    _, key_triangle = np.linalg.qr(np.asarray(key, np.float64))
    # A Bᵀ = Q_a (R_a R_bᵀ) Q_bᵀ: its best approximation is that of the core in the middle.
    core = query_triangle @ key_triangle.T
    left, values, right = np.linalg.svd(core)
    truncated = (left[:, :rank] * values[:rank]) @ right[:rank]
    query_inverse = np.linalg.pinv(query_triangle)
    key_inverse = np.linalg.pinv(key_triangle)
    return np.asarray(query_inverse @ truncated @ key_inverse.T)


def scores_of(query: Array, key: Array, scaling: float | None) -> Array:
    """Return scaled products of queries and keys, (B, H, N, N); key heads are repeated.

    Raises
    ------
    CheckpointError
        The numbers of queries and keys differ; scores then have no transpose.
    """
    if query.shape[-2] != key.shape[-2]:
        raise CheckpointError("parts need as many queries as keys: run the model without a cache")
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    heads_per_key_head = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(heads_per_key_head, dim=1)
    return query @ key.swapaxes(-1, -2) * scaling


def _inputs_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Array:
    """Return the hidden states (B, N, D) that an attention module is called with."""
    return args[0] if args else kwargs[INPUTS]


def _eager_attention_of(module: Any) -> Any:
    """Return the eager attention of the file that defines a module's class."""
    for module_class in type(module).__mro__:
        file = sys.modules.get(module_class.__module__)
        eager_attention = getattr(file, "eager_attention_forward", None)
        if eager_attention is not None:
            return eager_attention
    raise UnknownFamily(f"{type(module).__name__}: its file has no eager_attention_forward")


def _capped(scores: Array, options: dict[str, Any]) -> Array:
    """Return scores after the soft cap in the options of an attention, if any."""
    cap = options.get("softcap")
    return scores if cap is None else cap * (scores / cap).tanh()
