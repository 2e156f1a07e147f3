"""Parts of the scores in the place of the scores, while a model of transformers runs.

The logits of attention before mask and bias, S_ij = x_i W x_jᵀ times the model's scale, become
u S + v M, where M is a mirror image of S. With the transpose, the score of the same pair read the
other way, this is a (S + Sᵀ)/2 + b (S − Sᵀ)/2 for u = (a + b)/2 and v = (a − b)/2. Masks and
position terms stay whole, so that in a causal model only the lower triangle of Sᵀ enters. Rotary
positions and norms are in S, as the model computes it. The control's mirror is that of inputs
turned by a random involution that keeps their second moments (`wqk.live.reflections`).

No weights are touched. A model that calls transformers' attention interface adds its mask to the
scaled products of queries and keys; what changes the products is added to the mask.

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

# The name under which transformers knows the attention that mixes parts.
NAME = "wqk_parts"

# The argument of attention modules that takes the inputs.
INPUTS = "hidden_states"

Mirror = Literal["transpose", "next head", "involution", "rank"]


class Part(NamedTuple):
    """What takes the place of the scores: ``whole`` times S plus ``mirrored`` times its mirror.

    ``number`` tells random involutions apart, and is the rank of a truncated form. With
    ``size_of``, the part is a random one of the size of the symmetric or the skew part, head by
    head.
    """

    name: str
    whole: float = 0.0
    mirrored: float = 0.0
    mirror: Mirror = "transpose"
    number: int = 0
    size_of: Literal["", "symmetric", "skew"] = ""


def mixed(name: str, a: float, b: float, mirror: Mirror = "transpose", number: int = 0) -> Part:
    """``a`` times the even half of the scores plus ``b`` times the odd one.

    Examples
    --------
    >>> mixed("skew", 0, 1)[:3]
    ('skew', 0.5, -0.5)
    """
    return Part(name, (a + b) / 2, (a - b) / 2, mirror, number)


WHOLE, NONE, HALF = Part("whole", 1.0), Part("none"), Part("half", 0.5)
SYMMETRIC, SKEW = mixed("symmetric", 1, 0), mixed("skew", 0, 1)


class Place(NamedTuple):
    """Which scores are changed: those of a stack, a layer or a head."""

    stack: str
    layer: int | None = None
    head: int | None = None


@dataclass
class SumsOfSquares:
    """Sums of squares of scores and of their mirror, over a text."""

    mirror: float = 0.0
    scores: float = 0.0


class Mixer:
    """Lets a model run with parts of its scores; use within ``installed()``.

    Its ``part`` takes the place of the scores of its ``place`` in the passes that follow.

    Parameters
    ----------
    opened
        A `Model` opened from a `transformers` model.
    seed
        Of random involutions.
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
        self.place, self.part = Place(""), WHOLE
        self._checked: set[Any] = set()
        self._probing = False
        self._mirrored: dict[Any, Array] = {}
        self._between: dict[tuple[Any, int], Array] = {}
        self.roots: dict[Any, InputRoots] = {}
        self._moments: dict[Any, np.ndarray] = {}
        self._involutions: dict[tuple[int, int], Array] = {}
        self._squares: dict[int, SumsOfSquares] | None = None

    @contextmanager
    def installed(self) -> Iterator[Mixer]:
        """Put this attention in place of the model's, and give its own back in the end."""
        from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
        from transformers.masking_utils import eager_mask

        before = [
            (module.config, module.config._attn_implementation)
            for module in self.model.modules()
            if isinstance(module, PreTrainedModel)
        ]
        AttentionInterface.register(NAME, self.attend)
        AttentionMaskInterface.register(NAME, eager_mask)
        hooks = [
            module.register_forward_pre_hook(self._before, with_kwargs=True)
            for module in self.modules
        ]
        training = self.model.training
        try:
            self.model.set_attn_implementation(NAME)
            self.model.eval()
            yield self
        finally:
            self.model.train(training)
            for config, name in before:
                config._attn_implementation_internal = name
            for hook in hooks:
                hook.remove()

    def measure_inputs(self, run: Callable[[], object]) -> None:
        """Measure the second moments of all blocks' inputs, which random involutions keep.

        Parameters
        ----------
        run
            Runs the model on its text, with whole scores.
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

        The sums of squares are those of all heads and of all pairs of tokens of the text. The model
        runs with its whole scores.

        Parameters
        ----------
        run
            Runs the model on its text.
        stack
            The stack whose layers are measured.
        number
            Number of the involution, as in `Part`.
        """
        self.place, self.part = Place(stack), Part("", 1, 0, "involution", number)
        squares = self._squares = {}
        try:
            run()
        finally:
            self._squares = None
        return {layer: sums.mirror / sums.scores for layer, sums in squares.items() if sums.scores}

    def require_all_seen(self) -> None:
        """Raise `UnknownFamily` if some self-attention has not gone through the interface."""
        for module, plan in self.modules.items():
            if module not in self._checked:
                raise UnknownFamily(
                    f"{self.opened.name}: {type(module).__name__} of layer {plan.layer} did "
                    "not run through transformers' attention interface, so that its scores cannot "
                    "be replaced"
                )

    def _is_changed(self, module: Any) -> bool:
        plan = self.modules.get(module)
        return (
            plan is not None
            and self.part != WHOLE
            and self.place.stack == plan.stack
            and self.place.layer in (None, plan.layer)
        )

    def _before(self, module: Any, args: Any, kwargs: Any) -> None:
        """For a random involution, also compute queries and keys of the reflected inputs."""
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
        """The inputs of a block, turned by the part's involution.

        Square roots and involutions are kept in the type and on the device of the inputs.
        """
        import torch

        roots, width = self.roots.get(module), inputs.shape[-1]
        assert roots is not None, "measure_inputs() comes before a random involution"
        if isinstance(roots.root, np.ndarray):
            both = (torch.from_numpy(side).to(inputs) for side in (roots.root, roots.inverse_root))
            roots = self.roots[module] = InputRoots(*both)
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
        """Attention as the model's own code computes it, with other scores."""
        import torch

        own = _own_attention(module)

        def run(query: Array, mask: Array | None) -> Any:
            return own(module, query, key, value, mask, scaling=scaling, **options)

        if self._probing:
            self._mirrored[module] = scores_of(query, key, scaling).swapaxes(-1, -2)
            return query.new_zeros(*query.shape[:3], value.shape[-1]).swapaxes(1, 2), None
        if module in self.modules and module not in self._checked:
            # What is added to the mask must count as scores do.
            scores, mask = scores_of(query, key, scaling), attention_mask
            added = _capped(scores, options)
            added = added if mask is None else mask + added
            if not torch.allclose(
                run(query, mask)[0], run(0 * query, added)[0], rtol=1e-3, atol=1e-4
            ):
                raise UnknownFamily(
                    f"{self.opened.name}: {type(module).__name__} is no softmax of scaled products "
                    "plus a mask, so that its scores cannot be replaced"
                )
            self._checked.add(module)
        if not self._is_changed(module):
            return run(query, attention_mask)
        scores = scores_of(query, key, scaling)
        change = self._mixed(module, scores, query, key, scaling) - scores
        if self.place.head is not None:
            chosen = torch.arange(scores.shape[1], device=scores.device) == self.place.head
            change = change * chosen[:, None, None]
        if options.get("softcap") is not None:
            change = _capped(scores + change, options) - _capped(scores, options)
        return run(query, change if attention_mask is None else attention_mask + change)

    def _mixed(
        self, module: Any, scores: Array, query: Array, key: Array, scaling: float | None
    ) -> Array:
        """The part of the scores (B, H, N, N)."""
        part = self.part
        transposed = scores.swapaxes(-1, -2)
        if part.mirror == "involution":
            mirrored = self._mirrored.pop(module)
            if self._squares is not None:
                self._add_squares(module, mirrored, scores)
        elif part.mirror == "rank":
            mirrored = scores_of(query @ self._truncating(module, query), key, scaling)
        else:
            mirrored = transposed if part.mirror == "transpose" else transposed.roll(-1, 1)
        if not part.size_of:
            return part.whole * scores + part.mirrored * mirrored
        sides = (0, 2, 3)
        even = ((scores + transposed) / 2).square().sum(sides) / scores.square().sum(sides)
        size = (even if part.size_of == "symmetric" else 1 - even)[:, None, None]
        # If M is as large as S, p S + √(p(1 − p)) M has the share p of its size, and is orthogonal
        # to the rest.
        sign = 1 if part.size_of == "symmetric" else -1
        return size * scores + sign * (size * (1 - size)).sqrt() * mirrored

    def _add_squares(self, module: Any, mirror: Array, scores: Array) -> None:
        """Add the sums of squares of a mirror and of scores to those of the layer."""
        assert self._squares is not None
        sums = self._squares.setdefault(self.modules[module].layer, SumsOfSquares())
        sums.mirror += float(mirror.double().square().sum())
        sums.scores += float(scores.double().square().sum())

    def _truncating(self, module: Any, like: Array) -> Array:
        """What between queries and keys leaves the best rank k of each head's form, (H, R, R)."""
        import torch

        plan, rank = self.modules[module], self.part.number
        if (module, rank) not in self._between:
            block = self.opened.block(plan.layer, stack=plan.stack)
            between = [
                _between(head.qk.query, head.qk.key, rank)
                for head in (block[index] for index in range(plan.query.heads))
            ]
            self._between[module, rank] = torch.from_numpy(np.stack(between)).to(like)
        return self._between[module, rank]


def require_one_form(name: str, plan: AttentionPlan) -> None:
    """Raise `UnknownFamily` where a head has several forms, so that no rank is its own."""
    turned = plan.rotary is not None or plan.axial is not None
    normed = plan.query.norm is not None or plan.key.norm is not None
    if why := "rotary positions" if turned else "norms of queries and keys" if normed else "":
        raise UnknownFamily(
            f"{name}: with {why} a head has no single form whose rank could be cut; leave out rank"
        )


def _between(query: Float[Array, "D R"], key: Float[Array, "D R"], rank: int) -> np.ndarray:
    """P (R, R), such that A P Bᵀ is the best approximation of A Bᵀ of a rank."""
    a, b = (np.asarray(side, np.float64) for side in (query, key))
    ra, rb = np.linalg.qr(a)[1], np.linalg.qr(b)[1]
    left, values, right = np.linalg.svd(ra @ rb.T)
    kept = (left[:, :rank] * values[:rank]) @ right[:rank]
    return np.asarray(np.linalg.pinv(ra) @ kept @ np.linalg.pinv(rb).T)


def scores_of(query: Array, key: Array, scaling: float | None) -> Array:
    """Scaled products of queries and keys, (B, H, N, N), key heads repeated for their queries."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if query.shape[-2] != key.shape[-2]:
        raise CheckpointError("parts need as many queries as keys: run the model without a cache")
    return query @ key.swapaxes(-1, -2) * scale


def _inputs_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Array:
    """The hidden states (B, N, D) that an attention module is called with."""
    return args[0] if args else kwargs[INPUTS]


def _own_attention(module: Any) -> Any:
    """The eager attention of the file that defines a module."""
    for kind in type(module).__mro__:
        own = getattr(sys.modules.get(kind.__module__), "eager_attention_forward", None)
        if own is not None:
            return own
    raise UnknownFamily(f"{type(module).__name__}: its file has no eager_attention_forward")


def _capped(scores: Array, options: dict[str, Any]) -> Array:
    cap = options.get("softcap")
    return scores if cap is None else cap * (scores / cap).tanh()
